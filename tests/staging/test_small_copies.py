"""Small tensors on their way to the device: the values that were given, whatever came before and after."""

import pytest
import torch

from outcore.staging.pool import SmallCopies
from outcore.staging.pool.pool import HALF_BYTES

KINDS = [
    torch.tensor([[3, -1], [2**40, 7]]), torch.tensor([True, False, True]), torch.tensor([0.1], dtype=torch.float64),
]  # fmt: skip


def check(device: torch.device) -> None:
    copies = SmallCopies(device)
    for values in (*KINDS, KINDS[0].T, torch.zeros(0), torch.arange(HALF_BYTES)):
        found = copies.to(values)
        assert found.device == device and found.dtype == values.dtype and torch.equal(found.cpu(), values)


@pytest.mark.gpu
def test_values_arrive_on_a_gpu_though_the_ring_is_used_again():
    device = torch.device("cuda", 0)
    check(device)
    copies = SmallCopies(device)
    sent = [torch.full((5000,), i) for i in range(400)]  # 40 kB each: 32 rounds of the ring
    torch.cuda._sleep(50_000_000)
    found = [copies.to(values) for values in sent]
    assert all(bool((one == i).all()) for i, one in enumerate(found))


@pytest.mark.gpu
def test_a_small_copy_does_not_wait_behind_a_large_one():
    """The event behind it has passed while the large copy is still under way."""
    device = torch.device("cuda", 0)
    copies, host = SmallCopies(device), torch.empty(1 << 31, dtype=torch.uint8, pin_memory=True)
    there, values = torch.empty_like(host, device=device), torch.arange(100)
    assert torch.equal(copies.to(values).cpu(), values)
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        there.copy_(host, non_blocking=True)
        end = stream.record_event()
    found = copies.to(values)
    torch.cuda.current_stream(device).record_event().synchronize()
    assert not end.query(), "2 GiB take 40 ms over the fastest link there is"
    assert torch.equal(found.cpu(), values)
