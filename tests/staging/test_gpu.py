"""What only a GPU shows: really pinned, exact sizes, order with compute streams, intact data through both lanes."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from outcore.common.quantities import GIB, MIB
from outcore.staging import AT_ONCE, DownloadLane, LaneSettings, PinnedPool, UploadLane, probe_pinned_memory
from outcore.staging.pool.cuda_runtime import CudaRuntime, find_libcudart
from outcore.storage import BlockFile, PosixEngine, StorageEngine
from tests.refused import refused
from tests.staging.fakes import content_of, file_with, leave_without_closing, random_bytes

pytestmark = pytest.mark.gpu

SLOT_BYTES = 4 * MIB
SLEEP_CYCLES = 300_000_000  # about 0.15-0.2 s of a busy stream
CUDA0 = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def pool() -> Iterator[PinnedPool]:
    with PinnedPool(256 * MIB, device=CUDA0, write_combined_bytes=64 * MIB, probe=False) as pool:
        yield pool
        assert pool.free_bytes == pool.capacity_bytes


@pytest.fixture(scope="module")
def engine() -> Iterator[StorageEngine]:
    with PosixEngine() as engine:
        yield engine


def test_both_kinds_are_pinned_write_combined_where_asked_and_aligned(pool) -> None:
    assert pool.is_pinned and pool.notes == [] and pool.write_combined_bytes == 64 * MIB
    for write_combined in (False, True):
        with pool.lease(10 * MIB + 5, "test", write_combined) as lease:
            assert lease.is_pinned and lease.write_combined is write_combined
            assert lease.tensor.is_pinned() and lease.tensor[-1:].is_pinned()
            assert lease.tensor.data_ptr() % 4096 == 0
            assert lease.view(torch.float32, (1000,)).is_pinned()
            values = torch.randint(0, 256, (10 * MIB + 5,), dtype=torch.uint8)
            lease.tensor.copy_(values)
            assert torch.equal(lease.tensor.to(CUDA0, non_blocking=True).cpu(), values)


@pytest.mark.parametrize("has_cupy", [True, False])
def test_write_combined_memory_with_cupy_and_without_is_the_same(monkeypatch, has_cupy: bool) -> None:
    if has_cupy:
        pytest.importorskip("cupy")
    else:
        monkeypatch.setitem(sys.modules, "cupy", None)
        assert find_libcudart() is not None  # torch's own
    runtime = CudaRuntime(CUDA0)
    address = runtime.alloc_write_combined(1 * MIB)
    assert address % 4096 == 0 and (address in runtime._of_cupy) is has_cupy
    runtime.free_write_combined(address)


def test_8_gib_and_a_page_hold_what_was_asked_within_a_percent() -> None:
    asked_bytes = 8 * GIB + 4096
    if psutil.virtual_memory().available < 14 * GIB:
        pytest.skip("needs 14 GiB of free RAM")
    CudaRuntime(CUDA0)
    gc.collect()
    before_bytes = psutil.Process().memory_info().rss
    with PinnedPool(asked_bytes, device=CUDA0, probe=False) as pool:
        held_bytes = psutil.Process().memory_info().rss - before_bytes
        assert pool.capacity_bytes == asked_bytes and pool.largest_free_bytes() == asked_bytes
        assert abs(held_bytes - asked_bytes) < asked_bytes / 100
    left_bytes = psutil.Process().memory_info().rss - before_bytes
    assert left_bytes < asked_bytes / 100


def test_unpinned_again_after_closing() -> None:
    pool = PinnedPool(4 * MIB, device=CUDA0, probe=False)
    lease = pool.lease(1 * MIB, "x")
    stray = lease.tensor
    assert stray.is_pinned()
    lease.release()
    pool.close()
    assert not stray.is_pinned() and int(stray.sum()) == 0  # still mapped
    again = PinnedPool(4 * MIB, device=CUDA0, probe=False)
    again.close()


def test_the_probing_child_finds_a_gib_of_both_kinds() -> None:
    grant = probe_pinned_memory(CUDA0, 768 * MIB, 256 * MIB)
    assert grant.reasons == ()
    assert (grant.pinned_bytes, grant.write_combined_bytes, grant.largest_piece_bytes) == (
        768 * MIB,
        256 * MIB,
        768 * MIB,
    )


def test_a_refusal_leaves_cuda_usable() -> None:
    runtime = CudaRuntime(CUDA0)
    from outcore.staging.pool.cuda_runtime import PinRefused

    refused(PinRefused, "CUDA error", lambda: runtime.register(4096, 1 << 50))
    with pytest.raises(PinRefused):
        runtime.alloc_write_combined(1 << 50)
    assert int(torch.ones(5, device=CUDA0).sum()) == 5


@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_random_ranges_come_up_and_go_down_unchanged(pool, engine, tmp_path: Path, num_streams, num_slots) -> None:
    content = random_bytes(40 * MIB + 777)
    sizes = [1, 4096, SLOT_BYTES, SLOT_BYTES + 1, 5 * SLOT_BYTES + 4095, 300, 0, 2_000_001]
    offsets = [0, 4096, 1, 4095, 65_537, 1_000_000, 17, 123_456]
    with (
        file_with(tmp_path / "f", content) as file,
        UploadLane(pool, engine, CUDA0, LaneSettings(SLOT_BYTES, num_slots, True, num_streams=num_streams)) as up,
        DownloadLane(pool, engine, CUDA0, LaneSettings(SLOT_BYTES, num_slots, num_streams=num_streams)) as down,
        BlockFile(tmp_path / "g", "create", size_bytes=64 * MIB) as target,
    ):
        assert up.write_combined and not down.write_combined
        outs = [torch.full((n,), 7, dtype=torch.uint8, device=CUDA0) for n in sizes]
        transfers = [up.submit(file, offset, out) for offset, out in zip(offsets, outs)]
        for transfer in transfers:
            transfer.wait_stream()
        copies = [out.clone() for out in outs]  # on the current stream, no host wait in between
        position, places = 3, []
        for out in outs:
            places.append(position)
            position += out.numel() + 1000
        for transfer in [down.submit(out, target, place) for out, place in zip(outs, places)]:
            transfer.wait()
        for offset, copy in zip(offsets, copies):
            assert torch.equal(copy.cpu(), content[offset : offset + copy.numel()])
    written = content_of(tmp_path / "g")
    for offset, n_bytes, place in zip(offsets, sizes, places):
        assert torch.equal(written[place : place + n_bytes], content[offset : offset + n_bytes])


def test_an_upload_waits_for_the_compute_that_still_writes_its_target(pool, engine, tmp_path: Path) -> None:
    content = random_bytes(20 * MIB)
    with file_with(tmp_path / "f", content) as file, UploadLane(pool, engine, CUDA0, LaneSettings(SLOT_BYTES, 2)) as up:
        out = torch.zeros(20 * MIB, dtype=torch.uint8, device=CUDA0)
        torch.cuda._sleep(SLEEP_CYCLES)
        out.fill_(7)  # still queued when the reads have long finished
        up.submit(file, 0, out).wait()
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), content)


def test_an_upload_after_an_event_overtakes_compute_that_does_not_concern_it(pool, engine, tmp_path: Path) -> None:
    content = random_bytes(1 * MIB)
    with file_with(tmp_path / "f", content) as file, UploadLane(pool, engine, CUDA0, LaneSettings(SLOT_BYTES, 2)) as up:
        out = torch.zeros(1 * MIB, dtype=torch.uint8, device=CUDA0)
        free = torch.cuda.current_stream().record_event()
        up.submit(file, 0, out, after=free).wait()  # warm
        torch.cuda._sleep(20 * SLEEP_CYCLES)
        busy = torch.cuda.current_stream().record_event()
        for after in (free, AT_ONCE):
            up.submit(file, 0, out, after=after).wait()
            assert not busy.query()  # the compute stream has seconds to go
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), content)


def test_downloads_take_what_compute_produced_and_release_it_in_stream_order(pool, engine, tmp_path: Path) -> None:
    values = torch.randint(0, 256, (20 * MIB,), dtype=torch.uint8, device=CUDA0)
    expected = values.cpu()
    with (
        BlockFile(tmp_path / "f", "create", size_bytes=20 * MIB) as file,
        DownloadLane(pool, engine, CUDA0, LaneSettings(SLOT_BYTES, 2)) as down,
    ):
        src = torch.zeros_like(values)
        torch.cuda._sleep(SLEEP_CYCLES)
        src.copy_(values)
        transfer = down.submit(src, file, 0)
        transfer.wait_stream()
        src.zero_()  # queued behind the copies
        transfer.wait()
        torch.cuda.synchronize()
        assert int(src.sum()) == 0
    assert torch.equal(content_of(tmp_path / "f"), expected)


def test_a_target_that_the_caller_drops_is_not_handed_to_others_while_in_flight(pool, engine, tmp_path: Path) -> None:
    with (
        file_with(tmp_path / "f", torch.full((32 * MIB,), 9, dtype=torch.uint8)) as file,
        UploadLane(pool, engine, CUDA0, LaneSettings(SLOT_BYTES, 4)) as up,
    ):
        for _ in range(5):
            out = torch.empty(32 * MIB, dtype=torch.uint8, device=CUDA0)
            transfer = up.submit(file, 0, out)
            del out
            other = torch.full((32 * MIB,), 1, dtype=torch.uint8, device=CUDA0)
            transfer.wait()
            torch.cuda.synchronize()
            assert int(other.max()) == 1
            del other


@pytest.mark.parametrize("kind", ["pinned", "write-combined", "pageable"])
def test_ram_homes_in_both_directions(pool, kind: str) -> None:
    n_bytes = 40 * MIB + 12_345
    source = random_bytes(n_bytes)
    lease = None if kind == "pageable" else pool.lease(n_bytes, "home", kind == "write-combined")
    home = torch.empty(n_bytes, dtype=torch.uint8) if lease is None else lease.tensor
    home.copy_(source)
    out = torch.zeros(n_bytes, dtype=torch.uint8, device=CUDA0)
    with (
        UploadLane(pool, None, CUDA0, LaneSettings(SLOT_BYTES, 3, num_streams=2)) as up,
        DownloadLane(pool, None, CUDA0, LaneSettings(SLOT_BYTES, 3)) as down,
    ):
        up.submit_host(home, out).wait_stream()
        copy = out.clone()
        torch.cuda.synchronize()
        assert torch.equal(copy.cpu(), source)
        transfer = down.submit_host(copy.add_(1), home)
        transfer.wait()
        assert torch.equal(home, source + 1)
    if lease is not None:
        lease.release()


def test_a_program_that_closes_nothing_ends_cleanly(tmp_path: Path) -> None:
    file_with(tmp_path / "f", random_bytes(3 * MIB)).close()
    leave_without_closing(tmp_path / "f", "cuda:0")
