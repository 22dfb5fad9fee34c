"""The engine room of a lane: the thread that walks chunks through slots, and the waiters for its copies.

Algorithm: a transfer is cut into chunks of at most a slot. The driver's thread is the only one that places chunks into
slots, starts I/O and queues staged copies; it lives on messages ("submitted", "I/O ended", "copy ended") and never
blocks on the device. One waiter thread per stream blocks on copy events in order and sends the message when each has
passed, so a slot is taken up again only after its copy (upload) or its write (download) has ended. Transfers flow back
to back: the next one's chunks start as soon as a slot is free.

    upload:   place -> home fills the slot -> (gate) -> copy slot to device -> leave the slot
    download: place -> copy device to slot -> home drains the slot -> leave the slot

Cost: two or three thread switches per chunk (tens of microseconds), so slots of 4 MiB and more run at the drive's rate.
A failed chunk fails its transfer and leaves its slot; the lane goes on. A fault of the driver itself fails everything.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch

from outcore.staging.lanes.copy_streams import CopyEvent, CopyStreams, CopyWaiter
from outcore.staging.lanes.homes import BLOCK_BYTES, Home
from outcore.staging.lanes.slots import LaneClock, SlotPlace, SlotRing
from outcore.staging.lanes.transfer import LaneTransfer
from outcore.storage import StorageError, Transfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """A part of a transfer on its way through a slot."""

    transfer: LaneTransfer
    start_bytes: int
    place: SlotPlace
    device_bytes: torch.Tensor
    home: Home

    @property
    def n_bytes(self) -> int:
        return self.device_bytes.numel()


class LaneDriver:
    """Thread that drives the lanes. `settle(transfer)` is called on the driver's thread for every transfer that ended,
    `broke(error)` once when the driver itself failed."""

    def __init__(
        self,
        name: str,
        is_upload: bool,
        ring: SlotRing,
        streams: CopyStreams,
        clock: LaneClock,
        settle: Callable[[LaneTransfer], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self._is_upload = is_upload
        self._ring = ring
        self._streams = streams
        self._clock = clock
        self._settle = settle
        self._broke = broke
        self._pending: deque[LaneTransfer] = deque()
        self._parked: dict[LaneTransfer, list[Chunk]] = {}
        """Chunks whose reads have ended and whose gate is still shut; none of a direct transfer, which begins after."""
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waiters = [CopyWaiter(f"{name}-copies-{i}") for i in range(streams.count + 1)]
        self._cancelled: Callable[[LaneTransfer], BaseException] | None = None
        self._gate: CopyWaiter | None = None
        self._name = name
        self._thread = threading.Thread(target=self._run, name=f"{name}-lane", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ from any thread

    def post(self, message: Callable[[], None]) -> None:
        self._inbox.put(message)

    def accept(self, transfer: LaneTransfer, *, direct: bool = False) -> None:
        """Takes a transfer with a home; `direct` moves device memory by the engine, without slots."""
        self.post(partial(self._accept, transfer, direct))

    def watch(self, index: int, copy: CopyEvent, transfer: LaneTransfer, n_bytes: int, keep: torch.Tensor) -> None:
        """Counts a copy that the caller queued on stream `index` itself; `keep` stays alive until it has ended."""
        self._waiters[index].put(
            copy, lambda error: self.post(partial(self.ended, transfer, n_bytes, copy, keep, error))
        )

    def ended(
        self, transfer: LaneTransfer, n_bytes: int, copy: CopyEvent, keep: torch.Tensor, error: BaseException | None
    ) -> None:
        """Counts a copy that has ended; on any thread, once."""
        if error is None:
            self._clock.copied(transfer.label, n_bytes, copy)
        self._end(transfer, n_bytes, error)

    def lose(self, transfer: LaneTransfer, error: BaseException) -> None:
        """Ends a copy that the caller began (`begin_chunk`) and could not queue."""
        self.post(partial(self._end, transfer, 0, error))

    def cancel(self, make_error: Callable[[LaneTransfer], BaseException]) -> None:
        """Fails what has not been started."""
        self.post(partial(self._cancel, make_error))

    def close(self, timeout_s: float) -> None:
        """Ends the threads; nothing may be under way."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        for waiter in (*self._waiters, self._gate):
            if waiter is not None:
                waiter.close(timeout_s)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            message = self._inbox.get()
            if message is None:
                return
            try:
                message()
                self._pump()
            except BaseException as error:  # a fault of the lane itself: everybody hears of it
                self._broke(error)
                return
            del message  # an idle lane keeps no tensor alive

    def _accept(self, transfer: LaneTransfer, direct: bool) -> None:
        gate = transfer.gate
        if gate is not None:
            gate.when_settled(lambda: self.post(partial(self._gate_settled, transfer, direct)))
        if transfer.n_bytes == 0:
            self._settle(transfer)
        elif not direct:
            self._pending.append(transfer)
        elif gate is None:
            self._begin_direct(transfer)
        else:
            self._parked[transfer] = []

    def _gate_settled(self, transfer: LaneTransfer, direct: bool) -> None:
        if transfer.done():
            return
        assert transfer.gate is not None
        error = transfer.gate.error
        parked = self._parked.pop(transfer, [])
        for chunk in parked:
            self._pass_gate(chunk)
        if error is None and direct:
            self._begin_direct(transfer)
        elif error is not None and not parked and transfer.fail(error):
            self._settle(transfer)

    def _pass_gate(self, chunk: Chunk) -> None:
        gate = chunk.transfer.gate
        error = chunk.transfer.failure or (None if gate is None else gate.error)
        if error is not None:
            self._leave(chunk, error)
        else:
            self._start_copy(chunk)

    def _pump(self) -> None:
        """Starts chunks while there are slots for them."""
        while self._pending:
            transfer = self._pending[0]
            if transfer.is_begun:
                self._pending.popleft()
                continue
            home, device_bytes = transfer.home, transfer.device_bytes
            assert home is not None and device_bytes is not None
            start_bytes = transfer.next_bytes
            position_bytes = home.position_bytes(start_bytes)
            phase_bytes = position_bytes % BLOCK_BYTES
            n_bytes = min(self._ring.slot_bytes - phase_bytes, transfer.n_bytes - start_bytes)
            if start_bytes + n_bytes < transfer.n_bytes:
                n_bytes -= (position_bytes + n_bytes) % home.grain_bytes
            place = self._ring.place(n_bytes, phase_bytes)
            if place is None:
                return
            transfer.next_bytes += n_bytes
            transfer.begin_chunk()
            chunk = Chunk(transfer, start_bytes, place, device_bytes[start_bytes : start_bytes + n_bytes], home)
            if self._is_upload:
                self._start_io(chunk)
            else:
                self._start_copy(chunk)

    def _start_io(self, chunk: Chunk) -> None:
        move = chunk.home.fill if self._is_upload else chunk.home.drain
        self._clock.io_under_way += 1
        try:
            io = move(chunk.start_bytes, chunk.place.memory)
        except Exception as error:
            self._clock.io_under_way -= 1
            self._leave(chunk, error)
            return
        io.add_done_callback(lambda ended: self.post(partial(self._io_ended, chunk, ended)))

    def _io_ended(self, chunk: Chunk, io: Transfer) -> None:
        self._clock.io_under_way -= 1
        error = io.error
        if error is None and io.n_bytes != chunk.n_bytes:
            error = StorageError("staging", wanted=chunk.n_bytes, got=io.n_bytes, reason=f"short transfer: {io.what}")
        error = error or chunk.transfer.failure  # after a failure elsewhere in the transfer the rest is let go
        gate = chunk.transfer.gate
        if error is not None or not self._is_upload:
            self._leave(chunk, error)
        elif gate is not None and not gate.is_settled:
            self._parked.setdefault(chunk.transfer, []).append(chunk)
            if self._cancelled is not None:  # its read was under way then
                self._cancel(self._cancelled)
        else:
            self._pass_gate(chunk)

    def _start_copy(self, chunk: Chunk) -> None:
        transfer, slot = chunk.transfer, chunk.place.memory
        index = chunk.place.slot.index % self._streams.count
        target, source = (chunk.device_bytes, slot) if self._is_upload else (slot, chunk.device_bytes)
        try:
            copy = self._streams.copy(index, target, source, transfer.after_for(index))
        except Exception as error:
            self._leave(chunk, error)
            return
        transfer.note_issued(chunk.n_bytes, index, copy)
        if copy.is_over:
            self._copy_ended(chunk, copy, None)
        else:
            self._waiters[index].put(copy, lambda error: self.post(partial(self._copy_ended, chunk, copy, error)))

    def _copy_ended(self, chunk: Chunk, copy: CopyEvent, error: BaseException | None) -> None:
        if error is None:
            self._clock.copied(chunk.transfer.label, chunk.n_bytes, copy)
        error = error or chunk.transfer.failure
        if error is None and not self._is_upload:
            self._start_io(chunk)
        else:
            self._leave(chunk, error)

    def _leave(self, chunk: Chunk, error: BaseException | None) -> None:
        self._ring.leave(chunk.place)
        self._end(chunk.transfer, chunk.n_bytes, error)

    def _end(self, transfer: LaneTransfer, n_bytes: int, error: BaseException | None) -> None:
        if transfer.end_chunk(n_bytes, error):
            self._settle(transfer)

    def _cancel(self, make_error: Callable[[LaneTransfer], BaseException]) -> None:
        self._cancelled = make_error
        waiting = {one: list[Chunk]() for one in self._pending if not one.is_begun} | self._parked
        self._pending, self._parked = deque(), {}
        for transfer, chunks in waiting.items():
            for chunk in chunks:
                self._leave(chunk, make_error(transfer))
            if not chunks and transfer.fail(make_error(transfer)):
                self._settle(transfer)

    # ------------------------------------------------------------------ device-direct

    def _begin_direct(self, transfer: LaneTransfer) -> None:
        """The engine's clock is the host's: it may touch device memory only once `after` has passed there."""
        transfer.begin_chunk()
        after = transfer.after_for(0)
        if after is None:
            self._direct_ready(transfer, None)
            return
        if self._gate is None:
            self._gate = CopyWaiter(f"{self._name}-gate")
        self._gate.put(after, lambda error: self.post(partial(self._direct_ready, transfer, error)))

    def _direct_ready(self, transfer: LaneTransfer, error: BaseException | None) -> None:
        home, device_bytes = transfer.home, transfer.device_bytes
        assert home is not None and device_bytes is not None
        if error is not None:
            self._end(transfer, 0, error)
            return
        self._clock.io_under_way += 1
        try:
            # Engines order themselves behind the current stream: that is to be the lane's, not the one that computes.
            with self._streams.ambient():
                io = (home.fill if self._is_upload else home.drain)(0, device_bytes)
        except Exception as refused:
            self._clock.io_under_way -= 1
            self._end(transfer, 0, refused)
            return
        io.add_done_callback(lambda ended: self.post(partial(self._direct_ended, transfer, ended)))

    def _direct_ended(self, transfer: LaneTransfer, io: Transfer) -> None:
        self._clock.io_under_way -= 1
        if io.error is None:
            transfer.note_issued(transfer.n_bytes, 0, None)
        self._end(transfer, transfer.n_bytes, io.error)
