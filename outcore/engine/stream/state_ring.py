"""The ring: chunks of states on NVMe pass through a few host buffers, read ahead, updated, written behind.

Algorithm: one driver thread owns all decisions; reads, writes and updates report to it and it starts the next ones. A
chunk takes a slot, is read, waits there for its unit's gradient (`submit`), is updated by the optimizer pool as a batch
of its own, is written back and leaves. Chunks of units that are ready go first, the lowest unit before the others; the
slots left over read ahead what the next updates will need, in the order of the pass, whether or not the gradient or the
norm is known. Some slots are kept for units that are ready, so that reading ahead can never block them. Several reads
and writes are always under way: the drive waits neither for the CPU nor for one chunk. A unit counts as done when its
parameters may be read; writes of states go on under the next step.

Cost: `slots x slot_bytes` of RAM; a chunk is read once and written once per update. A failed transfer or update breaks
the ring: nothing is started any more and whoever waits gets an EngineError with the cause.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outcore.engine.base import EngineError
from outcore.engine.stream.homes import Homes
from outcore.engine.stream.host_memory import HostMemory
from outcore.engine.stream.placement import StateChunk
from outcore.engine.stream.ring_slots import Part, RingSlot, ring_slots
from outcore.engine.stream.stalls import BusyTime
from outcore.engine.stream.units import Unit
from outcore.optim import AdamWHyper, ChunkJob, ChunkResult, JobBatch, OptimizerPool
from outcore.storage import Transfer, gather
from outcore.units import format_s

logger = logging.getLogger(__name__)

BEFORE_ALL_UNITS = 1 << 20
"""Chunks of the ring are updated before those in RAM, of whatever unit: the drive waits for their slots."""
KEPT_SHARE = 4
"""One slot in so many, and at least one, is never used for reading ahead."""

REPORT_SLICE_S = 0.2
"""How often the wait for the optimizer looks whether the ring is being closed."""


class RingTicket:
    """One unit's update under way."""

    def __init__(self, unit: Unit, grad: torch.Tensor | None, hyper: AdamWHyper, unread: list[StateChunk]) -> None:
        self.unit, self.grad, self.hyper = unit, grad, hyper
        self.unread = unread
        self.left = len(unread)
        self.done = threading.Event()


@dataclass
class _Passage:
    """A chunk on its way through a slot."""

    chunk: StateChunk
    slot: RingSlot
    ticket: RingTicket | None = None
    reads_left: int = 0
    is_leaving: bool = False
    """It is updated or written."""

    @property
    def is_read(self) -> bool:
        return not self.reads_left


class StateRing:
    """See the module docstring. `submit` and the waits may be called from any thread.

    `descending`: units become ready from the last to the first (immediate updates), not the other way round.
    """

    def __init__(
        self,
        homes: Homes,
        pool: OptimizerPool,
        memory: HostMemory,
        *,
        ring_bytes: int,
        max_slots: int,
        descending: bool,
        timeout_s: float,
    ) -> None:
        self._homes, self._pool, self._timeout_s = homes, pool, timeout_s
        by_unit = [homes.flowing(unit) for unit in homes.units]
        self._order = [chunk for chunks in (reversed(by_unit) if descending else by_unit) for chunk in chunks]
        """In which order updates will need them."""
        self._place_after = {chunk.unit.index: place + 1 for place, chunk in enumerate(self._order)}
        slots = ring_slots(homes, self._order, memory, ring_bytes, max_slots)
        self.num_slots, self.slot_bytes = len(slots), slots[0].n_bytes
        self.read_bytes = self.written_bytes = 0
        """Moved by updates so far."""
        self.optimizer_time = BusyTime()
        """When the optimizer had a chunk of the ring to work at; otherwise whoever waits, waits for the drive."""
        self.error: BaseException | None = None
        self._fill(slots)
        # All below belongs to the driver thread.
        self._free = slots
        self._passages: dict[int, _Passage] = {}
        self._updating: dict[int, tuple[_Passage, RingTicket]] = {}
        self._ready: list[RingTicket] = []
        self._tickets: list[RingTicket] = []
        self._next_ahead = len(self._order)
        self._idle_waiters: list[threading.Event] = []
        self._num_transfers = 0
        self._stopping = False
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._updates_out = threading.Semaphore(0)
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"state-ring-{work.__name__.strip('_')}", daemon=True)
            for work in (self._drive, self._collect)
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------ called by the engine

    def begin_step(self) -> None:
        """Read ahead for a new step, from its first unit on."""
        self._events.put(lambda: self._move_ahead(0))

    def passed(self, unit: Unit) -> None:
        """The unit's gradient is complete; what is read ahead from now on comes after it."""
        if unit.index in self._place_after:
            self._events.put(lambda: self._move_ahead(self._place_after[unit.index]))

    def submit(self, unit: Unit, grad: torch.Tensor | None, hyper: AdamWHyper) -> RingTicket:
        """Update the unit's chunks on NVMe; `grad` stays as it is until the ticket is done.

        None: the gradient is on the drive too (`homes.grad_place`), all of it, and is read from now on.
        """
        self.check()
        ticket = RingTicket(unit, grad, hyper, self._homes.flowing(unit))
        self._events.put(lambda: self._begin(ticket))
        return ticket

    def is_done(self, ticket: RingTicket) -> bool:
        return ticket.done.is_set()

    def wait(self, ticket: RingTicket) -> None:
        """Until the unit's parameters may be read. TimeoutError, EngineError."""
        if not ticket.done.wait(self._timeout_s):
            raise TimeoutError(
                f"the states of {ticket.unit.name} on NVMe were not up to date within {format_s(self._timeout_s)}: the "
                "drive hangs, or is far slower than this run needs"
            )
        self.check()

    def check(self) -> None:
        """EngineError when a transfer or an update has failed since the start."""
        if self.error is not None:
            raise EngineError(
                f"optimizer states on NVMe could not be moved or updated: {self.error}. What RAM and the drive hold is "
                "no longer of one step; the last checkpoint is intact: resume from it."
            ) from self.error

    def flush(self) -> None:
        """Until the drive has everything and the ring is empty; it stays so until the next step. TimeoutError."""
        idle = threading.Event()
        self._events.put(lambda: self._empty(idle))
        if not idle.wait(self._timeout_s):
            self.check()
            raise TimeoutError(f"the drive did not take what was written to it within {format_s(self._timeout_s)}")
        self.check()

    def close(self) -> bool:
        """Start nothing more and wait, with a limit, for the transfers under way; False when they did not end."""
        if self._end.is_set():
            return True
        idle = threading.Event()
        self._events.put(lambda: self._stop(idle))
        ended = idle.wait(self._timeout_s)
        if not ended:
            logger.error("the drive did not finish its transfers within %s", format_s(self._timeout_s))
        self._end.set()
        self._events.put(None)
        self._updates_out.release()
        for thread in self._threads:
            thread.join(self._timeout_s)
        return ended

    # ------------------------------------------------------------------ the driver thread

    def _drive(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event()
                if self.error is None and not self._stopping:
                    self._start_reads()
            except BaseException as error:  # delivered to whoever waits
                self._fail(error)
            self._tell_idle()

    def _collect(self) -> None:
        """Hand the optimizer's reports of finished chunks to the driver."""
        while True:
            self._updates_out.acquire()
            report = None
            while report is None:
                if self._end.is_set():
                    return
                report = self._pool.next_chunk(REPORT_SLICE_S)
                if report is None:
                    self._end.wait(0.01)  # a closed pool answers at once
            self._events.put(lambda found=report: self._updated(found))

    def _move_ahead(self, place: int) -> None:
        self._next_ahead = place

    def _begin(self, ticket: RingTicket) -> None:
        if self.error is not None or not ticket.left:
            ticket.done.set()
            return
        self._tickets.append(ticket)
        unread: list[StateChunk] = []
        for chunk in ticket.unread:
            passage = self._passages.get(chunk.element_offset)
            if passage is None or passage.is_leaving:
                unread.append(chunk)
                continue
            passage.ticket = ticket
            self._fetch(passage, self._gradient(passage))  # read ahead, it came without
            if passage.is_read:
                self._update(passage)
        ticket.unread = unread
        if unread:
            self._ready.append(ticket)
            self._ready.sort(key=lambda ready: ready.unit.index)

    def _start_reads(self) -> None:
        for ticket in self._ready:
            if not self._free:
                return
            waiting: list[StateChunk] = []
            for chunk in ticket.unread:
                if self._free and chunk.element_offset not in self._passages:
                    self._read(chunk, ticket)
                else:
                    waiting.append(chunk)
            ticket.unread = waiting
        self._ready = [ticket for ticket in self._ready if ticket.unread]
        if self._ready:
            return
        kept = max(1, self.num_slots // KEPT_SHARE)
        ahead = sum(passage.ticket is None for passage in self._passages.values())
        busy = {ticket.unit.index for ticket in self._tickets}
        while self._free and ahead < self.num_slots - kept and self._next_ahead < len(self._order):
            chunk = self._order[self._next_ahead]
            if chunk.unit.index in busy:
                return  # of the step before: it is not written yet
            if chunk.element_offset in self._passages:
                if self._passages[chunk.element_offset].is_leaving:
                    return
            else:
                self._read(chunk, None)
                ahead += 1
            self._next_ahead += 1

    def _read(self, chunk: StateChunk, ticket: RingTicket | None) -> None:
        slot = self._free.pop()
        passage = self._passages[chunk.element_offset] = _Passage(chunk, slot, ticket)
        self._fetch(passage, slot.reads(chunk) + self._gradient(passage), is_first=True)

    def _gradient(self, passage: _Passage) -> list[Part]:
        """What is to be read of it, once it is complete."""
        if passage.ticket is None or passage.ticket.grad is not None:
            return []
        return passage.slot.gradient_reads(passage.chunk)

    def _fetch(self, passage: _Passage, parts: list[Part], *, is_first: bool = False) -> None:
        if not parts and not is_first:
            return
        passage.reads_left += 1
        transfers = [part.submit_read() for part in parts]
        self.read_bytes += sum(transfer.n_bytes for transfer in transfers)
        self._watch(transfers, f"read of {passage.chunk.name}", lambda: self._arrived(passage))

    def _arrived(self, passage: _Passage) -> None:
        passage.reads_left -= 1
        if passage.ticket is not None and passage.is_read:
            self._update(passage)

    def _update(self, passage: _Passage) -> None:
        chunk, ticket = passage.chunk, passage.ticket
        assert ticket is not None
        passage.is_leaving = True
        job = ChunkJob(
            passage.slot.gradient(chunk) if ticket.grad is None else ticket.grad[chunk.start : chunk.stop],
            passage.slot.states(chunk),
            passage.slot.param(chunk),
            chunk.element_offset,
        )
        batch = JobBatch(self._homes.state_format, [job])
        priority = chunk.unit.index - BEFORE_ALL_UNITS
        submitted = self._pool.submit(chunk.name, priority, batch, ticket.hyper, notify_chunks=True)
        self._updating[submitted.ticket_id] = (passage, ticket)
        self.optimizer_time.begins()
        self._updates_out.release()

    def _updated(self, report: ChunkResult) -> None:
        passage, ticket = self._updating.pop(report.ticket.ticket_id)
        self.optimizer_time.ends()
        if report.status != "done":
            self._pool.wait(report.ticket, self._timeout_s)  # raises what went wrong
            raise EngineError(f"the update of {passage.chunk.name} was {report.status}")
        waits_for_drive = passage.slot.holds_param(passage.chunk)
        if not waits_for_drive:
            self._count_down(ticket)
        if self._stopping or self.error is not None:
            return
        transfers = [part.submit_write() for part in passage.slot.writes(passage.chunk)]
        self.written_bytes += sum(transfer.n_bytes for transfer in transfers)
        self._watch(
            transfers,
            f"write of {passage.chunk.name}",
            lambda: self._written(passage, ticket if waits_for_drive else None),
        )

    def _written(self, passage: _Passage, ticket: RingTicket | None) -> None:
        self._leave(passage)
        if ticket is not None:
            self._count_down(ticket)

    def _leave(self, passage: _Passage) -> None:
        del self._passages[passage.chunk.element_offset]
        self._free.append(passage.slot)

    def _count_down(self, ticket: RingTicket) -> None:
        ticket.left -= 1
        if not ticket.left:
            self._tickets.remove(ticket)
            ticket.done.set()

    def _watch(self, transfers: Sequence[Transfer], what: str, then: Callable[[], None]) -> None:
        """Run `then` on the driver thread once all have ended well."""
        self._num_transfers += 1

        def ended(whole: Transfer) -> None:
            self._num_transfers -= 1
            if whole.error is not None:
                raise whole.error
            then()

        gather(transfers, what).add_done_callback(lambda whole: self._events.put(lambda: ended(whole)))

    def _empty(self, idle: threading.Event) -> None:
        self._move_ahead(len(self._order))
        self._idle_waiters.append(idle)

    def _stop(self, idle: threading.Event) -> None:
        self._stopping = True
        self._fail(RuntimeError("the engine was closed"))
        self._idle_waiters.append(idle)

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        for ticket in self._tickets:
            ticket.done.set()
        self._tickets, self._ready = [], []

    def _tell_idle(self) -> None:
        if not self._idle_waiters:
            return
        for passage in list(self._passages.values()):
            if passage.ticket is None and passage.is_read:
                self._leave(passage)  # read ahead, and not wanted
        broken = self.error is not None
        if not self._num_transfers and (broken or not (self._passages or self._tickets)):
            for idle in self._idle_waiters:
                idle.set()
            self._idle_waiters = []

    # ------------------------------------------------------------------ the start

    def _fill(self, slots: list[RingSlot]) -> None:
        """Write the states that training starts from, slot by slot behind each other."""
        begin_s = time.perf_counter()
        busy: list[Transfer | None] = [None] * len(slots)
        for number, chunk in enumerate(self._order):
            if not chunk.on_nvme:
                continue
            slot, before = slots[number % len(slots)], busy[number % len(slots)]
            if before is not None:
                before.wait(self._timeout_s)
            busy[number % len(slots)] = slot.initialise(chunk, self._timeout_s)
        for transfer in busy:
            if transfer is not None:
                transfer.wait(self._timeout_s)
        logger.info("states on NVMe written in %s", format_s(time.perf_counter() - begin_s))
