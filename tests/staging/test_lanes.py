"""Lanes on the CPU: right bytes at any offset and size, back-to-back transfers."""

import ctypes
import threading
import time
from pathlib import Path

import pytest
import torch

from outcore.common.quantities import KIB, MIB
from outcore.optim.digest import crc32_digest
from outcore.staging import AT_ONCE, DownloadLane, LaneSettings, PinnedPool, UploadLane
from outcore.storage import BlockFile, DigestRule, StorageError, TensorSpec, TensorStore
from tests.refused import refused
from tests.staging.fakes import LateEvent, LateStreams, TroubledEngine, content_of, file_with, random_bytes
from tests.waiting import until

SLOT_BYTES = 64 * KIB
CPU = torch.device("cpu")


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "fake device"])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_random_ranges_come_up_and_go_down_unchanged(pool, tmp_path: Path, late: bool, num_slots: int) -> None:
    engine = TroubledEngine(delay_s=0.002)
    content = random_bytes(1 * MIB + 777)
    model = content.clone()
    sizes = [1, 4096, SLOT_BYTES, SLOT_BYTES + 1, 5 * SLOT_BYTES + 4095, 300, 0, 200_001]
    offsets = [0, 4096, 1, 4095, 65_537, 1_000_000, 17, 123_456]
    with (
        file_with(tmp_path / "f", content) as file,
        UploadLane(
            pool, engine, CPU, LaneSettings(SLOT_BYTES, num_slots, True), streams=LateStreams(2) if late else None
        ) as up,
        DownloadLane(
            pool, engine, CPU, LaneSettings(SLOT_BYTES, num_slots), streams=LateStreams(2) if late else None
        ) as down,
    ):
        outs = [torch.full((n,), 7, dtype=torch.uint8) for n in sizes]
        transfers = [up.submit(file, offset, out) for offset, out in zip(offsets, outs)]
        for transfer, offset, out in zip(transfers, offsets, outs):
            assert transfer.wait(60) == out.numel() and transfer.done() and transfer.error is None
            assert torch.equal(out, content[offset : offset + out.numel()])
        sources = [random_bytes(n, seed=n) for n in sizes]
        writes = []
        for offset, source in zip(offsets, sources):
            writes.append(down.submit(source, file, offset))
            writes[-1].wait(60)  # these ranges overlap, so their order matters
            model[offset : offset + source.numel()] = source
        assert sum(t.n_bytes for t in writes) == down.moved_bytes == sum(sizes)
    engine.close()
    assert torch.equal(content_of(tmp_path / "f"), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_tensors_of_any_dtype_and_shape_through_a_file(pool, engine, tmp_path: Path, dtype: torch.dtype) -> None:
    source = (torch.randn(33, 77) * 3).to(dtype)
    with (
        BlockFile(tmp_path / "f", "create", size_bytes=1 * MIB) as file,
        UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES)) as up,
        DownloadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES)) as down,
    ):
        down.submit(source, file, 12_345).wait(60)
        out = torch.zeros_like(source)
        up.submit(file, 12_345, out).wait(60)
        assert torch.equal(out, source)
        scalar = torch.zeros((), dtype=dtype, requires_grad=dtype.is_floating_point)
        up.submit(file, 12_345, scalar).wait(60)  # parameters need no detaching
        assert torch.equal(scalar.detach(), source[0, 0])
    with torch.inference_mode():
        frozen = torch.zeros(33, 77, dtype=dtype)
    with UploadLane(pool, None, CPU, LaneSettings(SLOT_BYTES)) as up:
        up.submit_host(source, frozen).wait(60)
        assert torch.equal(frozen, source)


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "fake device"])
def test_pageable_ram_goes_through_slots_by_copy_threads(pool, late: bool) -> None:
    source, back = random_bytes(5 * MIB + 3), torch.zeros(5 * MIB + 3, dtype=torch.uint8)
    out = torch.zeros_like(source)
    with (
        UploadLane(
            pool, None, CPU, LaneSettings(2 * MIB, 1, copy_threads=2), streams=LateStreams() if late else None
        ) as up,
        DownloadLane(pool, None, CPU, LaneSettings(1 * MIB, 2), streams=LateStreams() if late else None) as down,
    ):
        up.submit_host(source, out).wait(60)
        down.submit_host(out, back).wait(60)
    assert torch.equal(out, source) and torch.equal(back, source)


@pytest.mark.parametrize(("slots", "pieces"), [(1, 2), (2, 1)])
def test_copying_threads_share_a_slot_only_where_slots_are_fewer(pool, monkeypatch, slots: int, pieces: int) -> None:
    """A piece a slot and thread: pieces of 2 MiB kept the interpreter busy, and launches waited for it."""
    sizes, copy = [], ctypes.memmove
    monkeypatch.setattr(ctypes, "memmove", lambda to, at, n_bytes: (sizes.append(n_bytes), copy(to, at, n_bytes)))
    source = random_bytes(4 * MIB)
    out = torch.zeros_like(source)
    with UploadLane(pool, None, CPU, LaneSettings(4 * MIB, slots, copy_threads=2)) as up:
        up.submit_host(source, out).wait(60)
    assert sizes == [4 * MIB // pieces] * pieces and torch.equal(out, source)


def test_pinned_ram_needs_no_slot_and_keeps_the_order_of_after(pool) -> None:
    source, out = random_bytes(40 * MIB), torch.zeros(40 * MIB, dtype=torch.uint8)
    streams = LateStreams(2, pinned={source.data_ptr()})
    ready = LateEvent()
    with UploadLane(pool, None, CPU, LaneSettings(SLOT_BYTES), streams=streams) as up:
        transfer = up.submit_host(source, out, after=ready)
        transfer.wait_stream("a stream", timeout_s=60)  # type: ignore[arg-type]
        assert [stream for stream, _ in streams.held] == ["a stream"]  # all on one stream
        assert streams.copies == 1 and not transfer.done()
        assert int(out.sum()) == 0
        ready.passed.set()
        assert transfer.wait(60) == 40 * MIB
    assert torch.equal(out, source)
    target = torch.zeros_like(out)
    with DownloadLane(
        pool, None, CPU, LaneSettings(SLOT_BYTES), streams=LateStreams(pinned={target.data_ptr()})
    ) as down:
        down.submit_host(out, target, after=AT_ONCE).wait(60)
    assert torch.equal(target, source)


def test_pinned_ram_comes_past_what_waits_in_line(pool) -> None:
    weights, rows = torch.rand(5_000), torch.rand(5_000)
    streams = LateStreams(pinned={weights.data_ptr(), rows.data_ptr()})
    buffer_free = LateEvent()
    with UploadLane(pool, None, CPU, LaneSettings(SLOT_BYTES), streams=streams) as lane:
        found = [torch.zeros(5_000) for _ in range(2)]
        waits = lane.submit_host(weights, found[0], after=buffer_free)
        lane.submit_host(rows, found[1], aside=True).wait()
        assert torch.equal(found[1], rows) and not waits.done()
        buffer_free.passed.set()
        waits.wait()
    assert torch.equal(found[0], weights)
    streams.close()


def test_a_slot_is_not_refilled_before_its_copy_has_ended(pool, tmp_path: Path) -> None:
    content = random_bytes(4 * SLOT_BYTES)
    engine, streams, ready = TroubledEngine(), LateStreams(), LateEvent()
    with (
        file_with(tmp_path / "f", content) as file,
        UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES, 2), streams=streams) as up,
    ):
        out = torch.zeros(4 * SLOT_BYTES, dtype=torch.uint8)
        transfer = up.submit(file, 0, out, after=ready)
        until(lambda: streams.copies >= 2)
        time.sleep(0.05)
        assert streams.copies == 2 and len(engine.requests) == 2  # both slots wait for their copies
        ready.passed.set()
        transfer.wait(60)
        assert torch.equal(out, content)
    engine.close()


def test_device_direct_transfers_use_no_slot_and_wait_for_the_device_first(pool, tmp_path: Path) -> None:
    content = random_bytes(1 * MIB)
    engine, ready = TroubledEngine(direct=True), LateEvent()
    with (
        file_with(tmp_path / "f", content) as file,
        UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES, direct=True), streams=LateStreams()) as up,
        DownloadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES, direct=True), streams=LateStreams()) as down,
    ):
        out = torch.zeros(500_000, dtype=torch.uint8)
        transfer = up.submit(file, 1000, out, after=ready)
        time.sleep(0.02)
        assert engine.requests == [] and not transfer.done()
        ready.passed.set()
        transfer.wait(60)
        transfer.wait_stream(timeout_s=60)
        assert torch.equal(out, content[1000:501_000]) and engine.requests == [("read", 1000, 500_000)]
        down.submit(out, file, 0, after=AT_ONCE).wait(60)
        assert engine.requests[-1] == ("write", 0, 500_000)
        engine.bad_offset = 0
        with pytest.raises(StorageError):
            down.submit(out, file, 0).wait(60)
        engine.refuse = RuntimeError("no")
        refused(RuntimeError, "no", lambda: up.submit(file, 0, out).wait(60))
        broken = LateEvent()
        broken.error = RuntimeError("the compute failed")
        broken.passed.set()
        refused(RuntimeError, "the compute failed", lambda: up.submit(file, 0, out, after=broken).wait(60))
    engine.close()
    assert torch.equal(content_of(tmp_path / "f")[:500_000], content[1000:501_000])


@pytest.mark.parametrize("verified", [False, True])
def test_tensors_of_a_store_striped_over_drives(pool, tmp_path: Path, verified: bool) -> None:
    weights, moments = torch.randn(1000, 1700), torch.randn(777).to(torch.bfloat16)
    specs = [TensorSpec("w", torch.float32, (1000, 1700)), TensorSpec("m", torch.bfloat16, (777,))]
    digests, folders = DigestRule(crc32_digest) if verified else None, [tmp_path / "a", tmp_path / "b"]
    with (
        TensorStore.create(folders, specs, stripe_bytes=64 * KIB, digests=digests) as store,
        UploadLane(pool, None, CPU, LaneSettings(2 * MIB, 2), streams=LateStreams()) as up,
        DownloadLane(pool, None, CPU, LaneSettings(2 * MIB, 2), streams=LateStreams()) as down,
    ):
        for transfer in [down.submit_stored(weights, store, "w"), down.submit_stored(moments, store, "m")]:
            transfer.wait(60)
        out, part = torch.zeros_like(weights), torch.zeros(100, dtype=torch.uint8)
        up.submit_stored(store, "w", out).wait(60)
        up.submit_stored(store, "m", part, 1001).wait(60)
        assert torch.equal(out, weights)
        assert torch.equal(part, moments.view(torch.uint8)[1001:1101])
        for call, message in (
            (lambda: up.submit_stored(store, "x", out), "no tensor 'x'"),
            (lambda: up.submit_stored(store, "w", out, 4), "do not fit into 'w'"),
            (lambda: up.submit_stored(store, "w", out.double()), "holds torch.float32"),
        ):
            refused(ValueError, message, call)
        if verified:
            piece = store.extent("w")[20]
            with open(piece.path, "r+b") as damaged:
                damaged.seek(piece.offset + 5)
                damaged.write(b"damage")
            refused(StorageError, "came back other", lambda: up.submit_stored(store, "w", out).wait(60))


@pytest.mark.slow
def test_soak_random_traffic_of_several_threads_through_shared_lanes(tmp_path: Path) -> None:
    """Each thread owns a range of the file and knows what is in it; a tenth of the requests hit a bad byte."""
    range_bytes, until_s = 1 * MIB, time.monotonic() + 60
    engine = TroubledEngine(delay_s=0.002, bad_offset=4 * range_bytes + 500_000)
    wrong: list[str] = []
    with (
        PinnedPool(2 * MIB, device=CPU) as pool,
        file_with(tmp_path / "f", random_bytes(5 * range_bytes)) as file,
        UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES, 4), streams=LateStreams(2)) as up,
        DownloadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES, 4), streams=LateStreams(2)) as down,
    ):
        first = random_bytes(5 * range_bytes)

        def work(number: int) -> None:
            base, chance = number * range_bytes, torch.Generator().manual_seed(number)
            model = first[base : base + range_bytes].clone()
            rounds = 0
            while time.monotonic() < until_s:
                rounds += 1
                start, size = (int(torch.randint(0, range_bytes // 2, (1,), generator=chance)) for _ in range(2))
                part = model[start : start + size]
                if rounds % 3 == 0:
                    part.copy_(random_bytes(size, seed=rounds * 7 + number))
                    down.submit(part.clone(), file, base + start).wait(60)
                else:
                    outs = [torch.zeros(size, dtype=torch.uint8) for _ in range(3)]
                    for transfer in [up.submit(file, base + start, out) for out in outs]:
                        transfer.wait(60)
                    if not all(torch.equal(out, part) for out in outs):
                        wrong.append(f"thread {number} round {rounds}: {size} bytes at {start}")
                if rounds % 10 == 0:
                    with pytest.raises(StorageError):
                        up.submit(file, 4 * range_bytes, torch.zeros(range_bytes, dtype=torch.uint8)).wait(60)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert wrong == [] and not any(thread.is_alive() for thread in threads)
    engine.close()
    assert torch.equal(content_of(tmp_path / "f")[4 * range_bytes :], first[4 * range_bytes :])


def test_nobody_watches_a_pinned_copy_until_somebody_asks(pool) -> None:
    source = random_bytes(MIB)
    outs = [torch.zeros(MIB, dtype=torch.uint8) for _ in range(4)]
    streams = LateStreams(pinned={source.data_ptr()})
    with UploadLane(pool, None, CPU, LaneSettings(SLOT_BYTES), streams=streams) as up:
        looked, called, drained = (up.submit_host(source, out, after=AT_ONCE) for out in outs[:3])
        until(looked.done)
        assert looked.done() and looked.wait(1) == MIB
        ended = threading.Event()
        called.add_done_callback(lambda transfer: ended.set())
        assert ended.wait(30)
        up.drain(30)
        assert drained.done()
        streams.fail_next = RuntimeError("the link is gone")
        failing = up.submit_host(source, outs[3], after=AT_ONCE)
        refused(RuntimeError, "link is gone", lambda: failing.wait(30))
        up.drain(30)
    assert all(torch.equal(out, source) for out in outs[:3])
