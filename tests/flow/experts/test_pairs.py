"""Who multiplies which pair, and that results come from them: kernels and torch say the same.

Without a GPU Triton's interpreter runs the kernels: `pip install triton`, then TRITON_INTERPRET=1 before pytest."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from outcore.flow.experts import few_tokens as pairs

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
CPU = torch.device("cpu")
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(not IS_INTERPRETED, reason="TRITON_INTERPRET=1 and triton")),
]


def shared_out(numbers, where, every, device):
    told = torch.full((40,), 99, dtype=torch.int32, device=device)
    given = [
        torch.tensor(numbers, device=device),
        where.to(device),
        torch.tensor([every], dtype=torch.int32, device=device),
    ]
    slots, links = pairs.share_out(*given, told)
    assert told.tolist() == [*numbers, *[99] * (40 - len(numbers))]
    return slots.tolist(), links.tolist()


def test_of_the_pairs_without_a_slot_one_in_so_many_goes_over_the_link():
    where = torch.tensor([-1, 4, -1, -1, 0, -1], dtype=torch.int32)
    assert shared_out([0, 1, 2, 3, 4, 5], where, 2, CPU) == ([-1, 4, -1, -1, 0, -1], [-1, -1, 2, -1, -1, 5])
    assert shared_out([5, 5, 1], where, 0, CPU) == ([-1, -1, 4], [-1, -1, -1])


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_say_what_torch_says(device, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    for count, width, dtype in ((8, 1536, torch.bfloat16), (1, 64, torch.float32), (33, 700, torch.float32)):
        where = torch.randint(-1, 3, (20,), generator=generator, dtype=torch.int32)
        numbers = torch.randint(0, 20, (count,), generator=generator).tolist()
        for every in (0, 1, 3):
            expected = shared_out(numbers, where, every, CPU)
            of_each = [
                torch.randn(count, width, generator=generator).to(kind) for kind in (dtype, dtype, torch.float32)
            ]
            split = [torch.tensor(of, dtype=torch.int32) for of in expected]
            results = pairs.collect(*split, *of_each)
            with monkeypatch.context() as patch:
                patch.setattr(pairs, "has_kernels", lambda device: True)
                assert shared_out(numbers, where, every, torch.device(device)) == expected
                found = pairs.collect(*(of.to(device) for of in (*split, *of_each)))
                assert found.dtype == dtype and torch.equal(found.cpu(), results)
