"""World of lanes: threads move bytes between a drive, RAM and a device through slots, and compare what arrives.

The real engine, files, store with digests, pool, slots and lanes; the drive and the device are simulated. Every region
belongs to one client, which knows its bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from outcore.common.quantities import KIB
from outcore.staging.lanes import AT_ONCE, DownloadLane, Gate, LaneClosed, LaneSettings, UploadLane
from outcore.staging.pool import PinnedPool
from outcore.storage import (
    BlockFile,
    ChangedBytes,
    DigestRule,
    PosixEngine,
    StorageError,
    TensorSpec,
    TensorStore,
    aligned_bytes,
)
from tests.simulation.drive import Drive, Faults
from tests.simulation.link import Device
from tests.simulation.threads import Simulation

GARBAGE = 0xEE
SPOILED = 0xDD
REGION_BYTES = 24 * KIB + 100
"""Neighbours in a file share a block."""


class Place:
    """Bytes somewhere: of a file, a stored tensor or RAM. `known`: what it holds; None after a failure."""

    def __init__(self, kind: str, where: Any, offset: int, n_bytes: int) -> None:
        self.kind, self.where, self.offset = kind, where, offset
        self.known: np.ndarray | None = np.zeros(n_bytes, dtype=np.uint8)
        self.n_bytes = n_bytes


class Lanes:
    """Both lanes, what they serve, and the clients."""

    def __init__(self, simulation: Simulation, drive: Drive) -> None:
        pick = simulation.random
        self.simulation, self.drive = simulation, drive
        drive.faults = Faults(
            error=pick.choice([0, 0, 0, 20]), short=pick.choice([0, 30, 200]), slow_s=pick.choice([0, 0.05]),
        )  # fmt: skip
        hasdigests = pick.random() < 0.6
        if hasdigests and pick.random() < 0.4:
            drive.faults = Faults(lost_write=60, torn_write=60, only="tensors.bin")
        drive.is_quiet = True
        self.engine = PosixEngine(pick.randint(1, 3), pick.choice([4, 8]) * KIB, max_requests=pick.choice([2, 64]))
        clients = pick.randint(1, 3)
        self.ram = {f"{kind}{n}": torch.zeros(REGION_BYTES, dtype=torch.uint8) for n in range(clients) for kind in "pr"}
        pinned = {self.ram[f"p{n}"].untyped_storage().data_ptr() for n in range(clients)}
        self.file = BlockFile(drive.root / "weights", "create", clients * REGION_BYTES)
        zeros = aligned_bytes(clients * REGION_BYTES)
        zeros[:] = 0
        self.file.write_from(zeros, 0)
        self.store = TensorStore.create(
            [drive.root / f"drive{n}" for n in range(pick.randint(1, 2))],
            [TensorSpec(f"t{n}", torch.uint8, (REGION_BYTES * 4 + pick.randint(0, 5000),)) for n in range(clients)],
            self.engine,
            stripe_bytes=4 * KIB,
            digests=DigestRule(digest) if hasdigests else None,
        )
        drive.is_quiet = False
        self.errors = pick.choice([0, 0, 0, 15])
        self.device = Device(
            simulation, pick.randint(1, 2), self.errors, lambda t: t.untyped_storage().data_ptr() in pinned
        )
        pool = PinnedPool(256 * KIB, device="cpu", probe=False)
        settings = LaneSettings(
            pick.choice([8, 12, 16]) * KIB, num_slots=pick.randint(1, 3), num_streams=self.device.count, copy_threads=2
        )
        cpu = torch.device("cpu")
        self.up = UploadLane(pool, self.engine, cpu, settings, streams=self.device)
        self.down = DownloadLane(pool, self.engine, cpu, settings, streams=self.device)
        self.pool, self.clients = pool, clients
        self.transfers: list[Any] = []
        self.spoiled: list[torch.Tensor] = []
        """Memory of transfers that failed, from then on for others' use."""

    def run(self) -> None:
        """Have the clients work, then close everything, now and then in their middle."""
        simulation, pick = self.simulation, self.simulation.random
        self.stays_shut = pick.random() < 0.15
        places = [place for number in range(self.clients) for place in self._places(number)]
        tasks = [simulation.start(lambda place=place: self._client(place), place.kind) for place in places]
        if self.stays_shut or pick.random() < 0.25:
            simulation.sleep(pick.random())
        else:
            simulation.block(lambda: all(task.is_over for task in tasks))
        for lane in (self.up, self.down):
            lane.close(cancel=self.stays_shut or pick.random() < 0.5)
        assert all(transfer.done() for transfer in self.transfers), "a lane was closed and a transfer has not ended"
        simulation.block(lambda: all(task.is_over for task in tasks))
        simulation.block(lambda: self.device.is_idle)
        assert self.pool.free_bytes == 256 * KIB, "closed lanes hold slots"
        if self.is_sound:
            assert not self.store.unchecked_bytes, "bytes came from the drive that no digest covers"
        for memory in self.spoiled:
            assert bool((memory == SPOILED).all()), "a transfer that failed wrote on"
        self.drive.is_quiet = True
        self._close_in_the_middle()
        self.file.close()

    def _close_in_the_middle(self) -> None:
        """Store and engine wait for what is under way, or fail what has not begun."""
        pick, memory = self.simulation.random, aligned_bytes(4 * REGION_BYTES)
        under_way = [self.store.submit_read("t0", torch.from_numpy(memory)) for _ in range(pick.randint(0, 2))]
        self.store.delete()
        assert all(transfer.done() for transfer in under_way), "a store was closed and its transfers go on"
        cancels = pick.random() < 0.5
        reads = [self.engine.submit_read(self.file, 0, memory[:REGION_BYTES]) for _ in range(pick.randint(0, 2))]
        self.engine.close(cancel=cancels)
        for read in reads:
            assert read.done(), "an engine was closed and its reads go on"
            assert cancels or read.error is None, "an engine was to finish what it had, and did not"

    @property
    def is_sound(self) -> bool:
        """Whether nothing was made to fail."""
        return not self.drive.struck and not self.device.failed

    # --- a client

    def _places(self, number: int) -> list[Place]:
        stored = self.store.spec(f"t{number}").n_bytes
        return [
            Place("file", self.file, number * REGION_BYTES, REGION_BYTES),
            Place("store", f"t{number}", 0, stored),
            Place("ram", self.ram[f"p{number}"], 0, REGION_BYTES),
            Place("ram", self.ram[f"r{number}"], 0, REGION_BYTES),
        ]

    def _client(self, place: Place) -> None:
        pick = self.simulation.random
        try:
            for _ in range(pick.randint(1, 5)):
                grain = pick.choice([1, 64, 4096])
                start = pick.randrange(place.n_bytes) // grain * grain
                most = min(place.n_bytes - start, 40 * KIB)
                at_edge = pick.randint(0, 10) * 4 * KIB + pick.choice([0, 1, 1, 4 * KIB - 1])  # of blocks and slots
                count = pick.choice([pick.randint(1, most), max(1, min(most, at_edge))])
                pick.choice([self._upload, self._upload, self._download])(place, start, count)
                if place.kind == "store" and pick.random() < 0.3:
                    self._directly(place, start, count)
        except (LaneClosed, RuntimeError) as error:
            assert self.up._closed, f"a client was refused: {error!r}"

    def _upload(self, place: Place, start: int, count: int) -> None:
        pick = self.simulation.random
        out = torch.full((count,), GARBAGE, dtype=torch.uint8)
        after: Any = None
        how = pick.choice(["before", "event", "at once"] + ["gate"] * (place.kind != "ram"))
        if how in ("before", "event", "gate"):
            self._use(out, GARBAGE)
        if how == "event":
            after = self.device.now()
        elif how == "at once":
            after = AT_ONCE
        elif how == "gate":
            after = Gate()
            gate_event = self.device.now()
            if not (self.stays_shut and pick.random() < 0.3):
                self.simulation.start(lambda: self._open(after, gate_event), "opener")
        if place.kind == "file":
            transfer = self.up.submit(place.where, place.offset + start, out, after=after)
        elif place.kind == "store":
            transfer = self.up.submit_stored(self.store, place.where, out, start, after=after)
        else:
            transfer = self.up.submit_host(place.where[start : start + count], out, after=after, aside=how == "at once")
        self.transfers.append(transfer)
        expected = None if place.known is None else place.known[start : start + count].copy()
        way = pick.random()
        if way < 0.1 and place.kind != "store":  # of which a write would leave bytes unchecked meanwhile
            return  # nobody asks
        if way < 0.5:
            ended = self._ends(transfer.wait, place, writes=False)
            if ended:
                _compare(out, expected, place)
        elif ended := self._ends(transfer.wait_stream, place, writes=False):
            seen = out.clone()  # of the right size; filled by the device, in its order
            self.device.compute(lambda: copy(seen, out)).synchronize()
            if ended := self._ends(transfer.wait, place, writes=False):
                _compare(seen, expected, place)
        if not ended and transfer.done():
            self.device.now().synchronize()
            self.spoiled.append(out.fill_(SPOILED))

    def _open(self, gate: Gate, event: Any) -> None:
        self.simulation.sleep(self.simulation.random.random() * 0.1)
        if self.simulation.chance(0.1):
            gate.cancel(LaneClosed("the memory is not given"))
        gate.open(event)

    def _use(self, out: torch.Tensor, value: int) -> None:
        """Have the device compute with memory that the next copy overwrites: it must not come before."""

        def work() -> None:
            assert bool((out == value).all()), "a copy came before the work that it had to wait for"

        self.device.compute(work)

    def _download(self, place: Place, start: int, count: int) -> None:
        pick = self.simulation.random
        data = torch.from_numpy(np.frombuffer(pick.randbytes(count), dtype=np.uint8).copy())
        source = torch.full((count,), GARBAGE, dtype=torch.uint8)
        self.device.compute(lambda: copy(source, data))
        after = self.device.now() if pick.random() < 0.5 else None
        if place.kind == "file":
            transfer = self.down.submit(source, place.where, place.offset + start, after=after)
        elif place.kind == "store":
            transfer = self.down.submit_stored(source, self.store, place.where, start, after=after)
        else:
            transfer = self.down.submit_host(source, place.where[start : start + count], after=after)
        self.transfers.append(transfer)
        if pick.random() < 0.5 and self._ends(transfer.wait_stream, place, writes=True):
            self.device.compute(lambda: copy(source, torch.full_like(source, GARBAGE)))
        if self._ends(transfer.wait, place, writes=True) and place.known is not None:
            place.known[start : start + count] = data.numpy()
            if place.kind == "ram":
                _compare(place.where[start : start + count], data.numpy(), place)

    def _directly(self, place: Place, start: int, count: int) -> None:
        """The store without a lane."""
        shift = self.simulation.random.choice([0, 0, 8])  # so that it is no accident which memory is aligned
        memory = torch.from_numpy(aligned_bytes(count + shift))[shift:].fill_(GARBAGE)
        transfer = self.store.submit_read(place.where, memory, start)
        again: list[Any] = []
        copied = torch.from_numpy(aligned_bytes(count))
        transfer.add_done_callback(lambda ended: again.append(self.store.submit_read(place.where, copied, start)))
        expected = None if place.known is None else place.known[start : start + count]
        if self._ends(lambda: transfer.wait(60.0), place, writes=False):
            _compare(memory, expected, place)
        assert self.simulation.block(lambda: bool(again), 60.0), "who is told of a read's end cannot begin another"
        if self._ends(lambda: again[0].wait(60.0), place, writes=False):
            _compare(copied, expected, place)

    def _ends(self, wait: Callable[[], Any], place: Place, *, writes: bool) -> bool:
        """Whether it ended well; else it said why, and the place's bytes are unknown where it wrote."""
        try:
            wait()
            return True
        except LaneClosed:
            pass
        except ChangedBytes:
            assert any("write" in words for words in self.drive.struck), "bytes are called changed and are not"
            place.known = None
        except StorageError as error:
            assert self.drive.struck, f"an error that the drive did not give: {error!r}"
        except RuntimeError as error:
            assert self.device.failed and "CUDA" in str(error), f"an error that the device did not give: {error!r}"
        if writes:
            place.known = None
        return False


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _compare(found: torch.Tensor, expected: np.ndarray | None, place: Place) -> None:
    if expected is not None and not np.array_equal(found.numpy(), expected):
        at = int(np.flatnonzero(found.numpy() != expected)[0])
        raise AssertionError(f"{place.kind}: byte {at} of {len(expected)} is not what was written there")


def digest(data: np.ndarray, block_bytes: int) -> np.ndarray:
    blocks = range(0, max(1, data.nbytes), block_bytes)
    return np.array([zlib.crc32(data[at : at + block_bytes].tobytes()) for at in blocks], dtype=np.uint64)


def world(simulation: Simulation, drive: Drive) -> None:
    """Run it."""
    Lanes(simulation, drive).run()
