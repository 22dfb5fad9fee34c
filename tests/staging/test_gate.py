"""Gated uploads: read ahead into slots while the device has no room, copied when the gate opens."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outcore.common.quantities import KIB, MIB
from outcore.staging import DownloadLane, Gate, LaneClosed, LaneSettings, PinnedPool, UploadLane
from outcore.storage import PosixEngine, StorageError
from tests.refused import refused
from tests.staging.fakes import LateEvent, LateStreams, file_with, random_bytes
from tests.storage.faulty import FaultyEngine
from tests.waiting import until

SLOT = 64 * KIB
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[PinnedPool]:
    with PinnedPool(2 * MIB, device=CPU) as pool:
        yield pool
        assert pool.free_bytes == pool.capacity_bytes


@pytest.fixture
def drive() -> Iterator[FaultyEngine]:
    inner = PosixEngine(2)
    yield FaultyEngine(inner)
    inner.close()


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "fake device"])
def test_slots_are_filled_ahead_and_copied_in_turn(pool, drive, tmp_path: Path, late: bool) -> None:
    content = random_bytes(10 * SLOT)
    outs = [torch.zeros(2 * SLOT, dtype=torch.uint8) for _ in range(5)]
    gates = [Gate() for _ in outs]
    event = LateEvent()
    with (
        file_with(tmp_path / "f", content) as file,
        UploadLane(pool, drive, CPU, LaneSettings(SLOT, 4), streams=LateStreams() if late else None) as lane,
    ):
        reads = drive.delay(0.0, "read")
        transfers = [lane.submit(file, i * 2 * SLOT, out, after=gate) for i, (out, gate) in enumerate(zip(outs, gates))]
        until(lambda: reads.fired == 4)  # all slots, and no more
        time.sleep(0.02)
        assert reads.fired == 4 and not any(out.any() for out in outs)
        for i, (transfer, gate) in enumerate(zip(transfers, gates)):
            event.passed.set()
            gate.open(event if late else None)
            transfer.wait_stream(timeout_s=30)
            transfer.wait(30)
            assert torch.equal(outs[i], content[i * 2 * SLOT : (i + 1) * 2 * SLOT])
            assert not any(out.any() for out in outs[i + 1 :])
        assert reads.fired == 10


def test_copies_wait_for_the_event_that_the_gate_was_opened_with(pool, drive, tmp_path: Path) -> None:
    content, out, event, gate = random_bytes(3 * SLOT), torch.zeros(3 * SLOT, dtype=torch.uint8), LateEvent(), Gate()
    with (
        file_with(tmp_path / "f", content) as file,
        UploadLane(pool, drive, CPU, LaneSettings(SLOT, 3), streams=LateStreams()) as lane,
    ):
        transfer = lane.submit(file, 0, out, after=gate)
        gate.open(event)
        transfer.wait_stream(timeout_s=30)  # issued behind the event
        time.sleep(0.02)
        assert not out.any()
        event.passed.set()
        transfer.wait(30)
        assert torch.equal(out, content)
        gate.cancel(RuntimeError("too late"))
        assert transfer.error is None


def test_a_cancelled_gate_fails_its_transfer_and_frees_the_slots(pool, drive, tmp_path: Path) -> None:
    content, outs = random_bytes(8 * SLOT), [torch.zeros(4 * SLOT, dtype=torch.uint8) for _ in range(2)]
    gates = [Gate(), Gate()]
    with file_with(tmp_path / "f", content) as file, UploadLane(pool, drive, CPU, LaneSettings(SLOT, 2)) as lane:
        reads = drive.delay(0.0, "read")
        first, second = (lane.submit(file, i * 4 * SLOT, out, after=g) for i, (out, g) in enumerate(zip(outs, gates)))
        until(lambda: reads.fired == 2)
        gates[1].cancel(RuntimeError("not wanted"))  # nothing of it has been read
        refused(RuntimeError, "not wanted", lambda: second.wait(30))
        gates[0].cancel(RuntimeError("aborted"))
        refused(RuntimeError, "aborted", lambda: first.wait(30))
        lane.submit(file, 0, outs[0]).wait(30)
        assert torch.equal(outs[0], content[: 4 * SLOT]) and not outs[1].any()
        assert reads.fired == 2 + 4


@pytest.mark.parametrize("opens", [True, False])
def test_a_failed_read_behind_a_gate_reaches_the_one_who_waits(pool, drive, tmp_path: Path, opens: bool) -> None:
    out, gate = torch.zeros(4 * SLOT, dtype=torch.uint8), Gate()
    with (
        file_with(tmp_path / "f", random_bytes(4 * SLOT)) as file,
        UploadLane(pool, drive, CPU, LaneSettings(SLOT, 4)) as lane,
    ):
        drive.fail("read", after=1)
        transfer = lane.submit(file, 0, out, after=gate)
        until(lambda: transfer.error is not None)  # cancelled before the lane heard of the failure, it says "given up"
        if opens:
            gate.open()
        else:
            gate.cancel(RuntimeError("given up"))
        refused(StorageError, "injected", lambda: transfer.wait(30))
        lane.submit(file, 0, out).wait(30)


@pytest.mark.parametrize("kind", ["read", "being read", "direct"])
def test_closing_a_lane_ends_what_waits_behind_a_gate(pool, drive, tmp_path: Path, kind: str) -> None:
    drive.moves_device_memory = kind == "direct"
    with file_with(tmp_path / "f", random_bytes(4 * SLOT)) as file:
        lane = UploadLane(pool, drive, CPU, LaneSettings(SLOT, 2, direct=kind == "direct"))
        outs = [torch.zeros(2 * SLOT, dtype=torch.uint8) for _ in range(2)]
        reads = drive.delay(0.2 * (kind == "being read"), "read")
        transfers = [lane.submit(file, 0, out, after=Gate()) for out in outs]
        waiting = 0 if kind == "direct" else 2
        until(lambda: reads.fired == waiting)
        until(lambda: kind != "read" or len(lane._driver._parked.get(transfers[0], [])) == 2)
        lane.close(cancel=True, timeout_s=5)
        for transfer in transfers:
            with pytest.raises(LaneClosed):
                transfer.wait(30)


def test_gates_are_for_uploads_from_a_drive(pool, drive, tmp_path: Path) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    with (
        file_with(tmp_path / "f", random_bytes(64)) as file,
        UploadLane(pool, drive, CPU, LaneSettings(SLOT)) as up,
        DownloadLane(pool, drive, CPU, LaneSettings(SLOT)) as down,
    ):
        refused(ValueError, "from a drive", lambda: up.submit_host(memory, memory.clone(), after=Gate()))
        refused(ValueError, "from a drive", lambda: down.submit(memory, file, 0, after=Gate()))
        empty = up.submit(file, 0, memory[:0], after=Gate())
        assert empty.wait(30) == 0
