"""Lanes on the CPU: errors where the data is awaited, waits that end, programs that close nothing."""

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from outcore.common.quantities import KIB, MIB
from outcore.staging import DownloadLane, LaneClosed, LaneSettings, PinnedPool, PinnedPoolFull, UploadLane
from outcore.storage import StorageError
from tests.refused import refused
from tests.staging.fakes import LateStreams, TroubledEngine, file_with, leave_without_closing, random_bytes
from tests.waiting import until

SLOT_BYTES = 64 * KIB
CPU = torch.device("cpu")


def test_an_io_error_arrives_where_the_data_is_awaited_and_the_lane_goes_on(pool, tmp_path: Path) -> None:
    content = random_bytes(1 * MIB)
    engine = TroubledEngine(delay_s=0.001, bad_offset=300_000)
    with file_with(tmp_path / "f", content) as file:
        for lane in (
            UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES, 3), streams=LateStreams()),
            DownloadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES, 3), streams=LateStreams()),
        ):
            heard: list[bool] = []

            def go(offset: int, n_bytes: int, lane=lane) -> tuple:
                device = torch.zeros(n_bytes, dtype=torch.uint8)
                if isinstance(lane, UploadLane):
                    return lane.submit(file, offset, device), device
                return lane.submit(device, file, offset), device

            bad, _ = go(200_000, 400_000)
            bad.add_done_callback(lambda t, heard=heard: heard.append(t.error is not None))
            good = [go(600_000 + i, 100_000) for i in range(4)]
            for look in (bad.wait, bad.wait, bad.wait_stream):
                with pytest.raises(StorageError) as failure:
                    look(timeout_s=60)
                assert failure.value.path == tmp_path / "f" and failure.value.errno == 5
            assert bad.done() and heard == [True] and "failed" in repr(bad)
            for i, (transfer, device) in enumerate(good):
                assert transfer.wait(60) == 100_000
                if isinstance(lane, UploadLane):
                    assert torch.equal(device, content[600_000 + i : 700_000 + i])
            lane.close()
    engine.close()


def test_short_refused_and_broken_copies_are_errors(pool, tmp_path: Path) -> None:
    engine, streams = TroubledEngine(), LateStreams()
    out = torch.zeros(100, dtype=torch.uint8)
    with file_with(tmp_path / "f", random_bytes(1 * MIB)) as file:
        with UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES), streams=streams) as up:
            engine.short_by = 1
            refused(StorageError, "wanted 100 bytes, got 99", lambda: up.submit(file, 0, out).wait(60))
            engine.short_by = 0
            engine.refuse = RuntimeError("the engine is closed")
            refused(RuntimeError, "the engine is closed", lambda: up.submit(file, 0, out).wait(60))
            engine.refuse = None
            streams.fail_next = RuntimeError("CUDA error: an illegal memory access")
            refused(RuntimeError, "illegal memory access", lambda: up.submit(file, 0, out).wait(60))
            past_the_end = up.submit(file, 1 * MIB - 10, out)
            refused(StorageError, "got 10", lambda: past_the_end.wait(60))
            assert up.submit(file, 0, out).wait(60) == 100
        with UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES)) as up:
            up.streams.copy = None  # type: ignore[assignment,method-assign]
            with pytest.raises(TypeError):
                up.submit(file, 0, out).wait(60)
    engine.close()


def test_every_wait_ends_and_says_what_it_waited_for(pool, tmp_path: Path) -> None:
    engine = TroubledEngine()
    with file_with(tmp_path / "f", random_bytes(1 * MIB)) as file:
        up = UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES, 2, timeout_s=0.05), owner="params up")
        engine.hold.clear()
        out = torch.zeros(3 * SLOT_BYTES, dtype=torch.uint8)
        transfer = up.submit(file, 4096, out)
        with pytest.raises(TimeoutError) as late:
            transfer.wait()
        text = str(late.value)
        assert "upload of 192.00 KiB" in text and "offset 4096" in text and "is not done after 50 ms" in text
        assert "2 chunks in flight" in text and "upload lane 'params up'" in text
        refused(TimeoutError, "is not issued after 10 ms", lambda: transfer.wait_stream(timeout_s=0.01))
        refused(TimeoutError, "not idle", up.close)
        refused(LaneClosed, "is closed", lambda: up.submit(file, 0, out))
        engine.hold.set()
        assert transfer.wait(60) == 3 * SLOT_BYTES and "done" in repr(transfer)
        up.close(timeout_s=60)
        up.close()
    engine.close()


def test_closing_with_work_in_flight_finishes_it_or_cancels_what_has_not_begun(pool, tmp_path: Path) -> None:
    content = random_bytes(1 * MIB)
    engine = TroubledEngine(delay_s=0.003)
    with file_with(tmp_path / "f", content) as file:
        outs = [torch.zeros(100_000, dtype=torch.uint8) for _ in range(8)]
        with UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES), streams=LateStreams()) as up:
            transfers = [up.submit(file, 100_000 * i, out) for i, out in enumerate(outs)]
        assert all(t.done() and t.error is None for t in transfers)
        assert all(torch.equal(out, content[100_000 * i : 100_000 * (i + 1)]) for i, out in enumerate(outs))

        engine.hold.clear()
        up = UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES), streams=LateStreams())
        transfers = [up.submit(file, 0, out) for out in outs]
        threading.Timer(0.05, engine.hold.set).start()
        up.close(cancel=True, timeout_s=60)
        errors = [t.error for t in transfers]
        assert isinstance(errors[-1], LaneClosed) and "cancelled" in str(errors[-1])
        with pytest.raises(LaneClosed):
            transfers[-1].wait()

        with (
            pytest.raises(KeyError, match="the caller's own"),
            UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES), streams=LateStreams()) as up,
        ):
            transfers = [up.submit(file, 0, out) for out in outs]
            raise KeyError("the caller's own")
        assert all(t.done() for t in transfers)
    engine.close()


def test_a_fault_of_the_lane_itself_reaches_everyone(tmp_path: Path, engine) -> None:
    pool = PinnedPool(1 * MIB, device=CPU)
    out = torch.zeros(100, dtype=torch.uint8)
    with file_with(tmp_path / "f", random_bytes(1 * MIB)) as file:
        up = UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES))
        up.clock.io_under_way = None  # type: ignore[assignment]
        refused(RuntimeError, "was lost, its lane broke", lambda: up.submit(file, 0, out).wait(60))
        refused(RuntimeError, "broken", lambda: up.submit(file, 0, out))
        refused(RuntimeError, "slots stay leased", up.close)


def test_a_raising_callback_does_not_hurt_the_lane(pool, engine, tmp_path: Path, caplog) -> None:
    out = torch.zeros(100, dtype=torch.uint8)
    with (
        file_with(tmp_path / "f", random_bytes(1 * MIB)) as file,
        UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES)) as up,
    ):
        transfer = up.submit(file, 0, out)
        transfer.add_done_callback(lambda t: {}["missing"])
        transfer.wait(60)
        up.drain(60)
        later: list[int] = []
        transfer.add_done_callback(lambda t: later.append(t.n_bytes))
        assert later == [100]
        assert up.submit(file, 0, out).wait(60) == 100


def test_a_failure_that_nobody_awaits_is_logged(pool, tmp_path: Path, caplog) -> None:
    engine = TroubledEngine(bad_offset=0)
    with file_with(tmp_path / "f", random_bytes(1 * MIB)) as file:
        with UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES)) as up:
            up.submit(file, 0, torch.zeros(100, dtype=torch.uint8))
        del up
    engine.close()
    until(lambda: "nobody waited for a transfer that failed: upload of 100 B" in caplog.text)


def test_copying_threads_that_the_system_refuses_fail_a_transfer_and_not_those_after_it(pool, monkeypatch) -> None:
    """A thread that never ran was counted: copies waited for it, and closing failed."""
    source, denied, start = random_bytes(100), [], threading.Thread.start

    def start_later(thread: threading.Thread) -> None:
        if "-copy-" in thread.name and not denied:
            denied.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    out = torch.zeros_like(source)
    with UploadLane(pool, None, CPU, LaneSettings(SLOT_BYTES, copy_threads=1)) as up:
        refused(RuntimeError, "can't start new thread", lambda: up.submit_host(source, out).wait(60))
        assert up.submit_host(source, out).wait(60) == 100
    assert torch.equal(out, source)


def test_a_copy_that_raises_ends_its_transfer_and_not_its_thread(pool, monkeypatch) -> None:
    """Whoever waited for it waited until the lane's timeout, and for all that followed."""
    source, failures, move = random_bytes(100), ["no such address"], ctypes.memmove

    def fail_once(*ends: int) -> object:
        if failures:
            raise OSError(failures.pop())
        return move(*ends)

    monkeypatch.setattr(ctypes, "memmove", fail_once)
    out = torch.zeros_like(source)
    with UploadLane(pool, None, CPU, LaneSettings(SLOT_BYTES, copy_threads=1)) as up:
        refused(OSError, "no such address", lambda: up.submit_host(source, out).wait(60))
        assert up.submit_host(source, out).wait(60) == 100
    assert torch.equal(out, source)


def test_unsuitable_arguments_fail_before_anything_moves(pool, engine, tmp_path: Path) -> None:
    out = torch.zeros(64, 64)
    for arguments, message in (
        ({"slot_bytes": 1000}, "multiple of 4096"),
        ({"slot_bytes": SLOT_BYTES, "num_slots": 0}, "at least one slot"),
        ({"slot_bytes": SLOT_BYTES, "timeout_s": 0}, "timeout_s"),
        ({"slot_bytes": SLOT_BYTES, "num_streams": 0}, "at least one stream"),
        ({"slot_bytes": SLOT_BYTES, "direct": True}, "'posix' does not: open kvikio"),
        ({"slot_bytes": SLOT_BYTES, "device": "meta"}, "lanes serve CUDA devices and the CPU"),
    ):
        with pytest.raises(ValueError, match=message):
            device = arguments.pop("device", CPU)
            UploadLane(pool, engine, device, LaneSettings(**arguments))
    with pytest.raises(ValueError, match="cannot be write-combined"):
        DownloadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES, write_combined=True))
    before_bytes = pool.free_bytes
    refused(PinnedPoolFull, "'upload slot 6'", lambda: UploadLane(pool, engine, CPU, LaneSettings(2 * MIB, 8)))
    assert pool.free_bytes == before_bytes  # the slots it had got are back
    with (
        file_with(tmp_path / "f", random_bytes(1 * MIB)) as file,
        UploadLane(pool, engine, CPU, LaneSettings(SLOT_BYTES)) as up,
    ):
        for call, message in (
            (lambda: up.submit(file, -1, out), "negative"),
            (lambda: up.submit(file, 0, out.t()), "contiguous"),
            (lambda: up.submit(file, 0, out.to("meta")), "serves cpu, not meta"),
            (lambda: up.submit_host(out.t(), out), "not contiguous"),
            (lambda: up.submit_host(out[:3], out), "differ in size: 768 bytes in RAM, 16384 on cpu"),
            (lambda: up.submit(file, 0, out, after="never"), "AT_ONCE"),
        ):
            refused(ValueError, message, call)
        with (
            UploadLane(pool, None, CPU, LaneSettings(SLOT_BYTES)) as ram_only,
            pytest.raises(ValueError, match="without a storage"),
        ):
            ram_only.submit(file, 0, out)


@pytest.mark.more
def test_a_program_that_closes_nothing_ends_cleanly(tmp_path: Path) -> None:
    file_with(tmp_path / "f", random_bytes(3 * MIB)).close()
    leave_without_closing(tmp_path / "f", "cpu")
