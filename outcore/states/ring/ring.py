"""The ring: chunks of states on NVMe pass through a few host buffers, read ahead, updated, written behind.

Algorithm: one driver thread owns all decisions (`schedule`: which chunk is read next); reads, writes and updates
(`traffic`) report to it and it starts the next ones. A chunk takes a slot, is read, waits there for its unit's gradient
(`submit`), is updated by the optimizer pool as a batch of its own, is written back and leaves. Several reads and writes
are always under way: the drive waits neither for the CPU nor for one chunk. A unit counts as done when its parameters
may be read; writes of states go on under the next step.

Cost: `slots x slot_bytes` of RAM; a chunk is read once and written once per update, but for those that a ring whose
passes go to and fro keeps in its slots for the next pass (`schedule`): of them only the parameters are written, so
that they may be read from the drive, and `flush` takes their states there. A failed transfer or update breaks the ring:
nothing is started any more and whoever waits gets an EngineError with the cause.

What is under way of the state ring: reads and writes of parts of a chunk, and chunks at the optimizer.

The end of each is told to the driver thread. A chunk at the optimizer is a batch of its own; the pool reports finished
ones one by one to whoever asks: a thread of its own here, which asks while any is out."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch

from outcore.common.deadline import CLOSE_TIMEOUT_S, GRACE_S, TIMEOUT_S
from outcore.common.errors import EngineError
from outcore.common.quantities import format_s
from outcore.flow.trace import BusyTime
from outcore.optim import AdamWHyper, ChunkResult, JobBatch, MatrixJob, MatrixUpdates, OptimizerPool
from outcore.sizing.ring import NEVER, worth_keeping
from outcore.staging.pool import HostMemory
from outcore.states.placement import ChunkHomes, StateChunk, Updatable
from outcore.states.ring.schedule import ChunkPassage, RingSchedule, RingTicket
from outcore.states.ring.slots import Stretch, initialise_states, needed_bytes, ring_slots
from outcore.storage import Transfer, gather

BEFORE_ALL_UNITS = 1 << 20
"""Chunks of the ring are updated before those in RAM, of whatever unit: the drive waits for their slots."""
REPORT_SLICE_S = 0.2
"""Seconds between two looks at whether the ring is being closed, while it waits for the optimizer."""


class RingTraffic:
    """`report(event)`: have the driver thread call `event`. All methods are called on that thread."""

    def __init__(self, report: Callable[[Callable[[], None]], None]) -> None:
        self._report = report
        self._under_way = 0
        self.read_bytes = self.written_bytes = 0
        """Bytes moved since the ring was opened."""

    @property
    def is_idle(self) -> bool:
        """True while no transfer of the drive uses a slot's memory."""
        return not self._under_way

    def read(self, name: str, parts: Sequence[Stretch], then: Callable[[], None]) -> None:
        """Fill `parts` of the chunk `name`; `then` on the driver thread once all is well, else its failure there.

        Raises when one of them cannot be submitted; `then` is not called then."""
        self.read_bytes += self._start(f"read of {name}", [part.submit_read for part in parts], then)

    def write(self, name: str, parts: Sequence[Stretch], then: Callable[[], None]) -> None:
        """Bring `parts` to the drive; otherwise as `read`."""
        self.written_bytes += self._start(f"write of {name}", [part.submit_write for part in parts], then)

    def _start(self, what: str, submits: Sequence[Callable[[], Transfer]], then: Callable[[], None]) -> int:
        """When one is refused those before it are waited for all the same: their memory is the drive's until they end.
        Returns bytes."""
        transfers: list[Transfer] = []
        try:
            for submit in submits:
                transfers.append(submit())
        except BaseException:
            self._watch(what, transfers, lambda: None)
            raise
        self._watch(what, transfers, then)
        return sum(transfer.n_bytes for transfer in transfers)

    def _watch(self, what: str, transfers: Sequence[Transfer], then: Callable[[], None]) -> None:
        self._under_way += 1

        def ended(whole: Transfer) -> None:
            self._under_way -= 1
            if whole.error is not None:
                raise whole.error
            then()

        gather(transfers, what).add_done_callback(lambda whole: self._report(lambda: ended(whole)))


class RingUpdates:
    """`report(event)`: have the driver thread call `event`. `submit` is called on that thread. `muon`: updates
    matrices that have a momentum alone."""

    def __init__(
        self,
        pool: OptimizerPool,
        timeout_s: float,
        report: Callable[[Callable[[], None]], None],
        muon: MatrixUpdates | None = None,
    ) -> None:
        self._pool, self._timeout_s, self._report, self._muon = pool, timeout_s, report, muon
        self.busy_time = BusyTime()
        """When the optimizer had a chunk of the ring to work at."""
        self._under_way: dict[int, tuple[ChunkPassage, Callable[[], None]]] = {}
        self._out = threading.Semaphore(0)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="state-ring-collect", daemon=True)
        self._thread.start()

    def submit(self, passage: ChunkPassage, ticket: RingTicket, then: Callable[[], None]) -> None:
        """Update a chunk in its slot; `then` on the driver thread when it is over, or what went wrong there."""
        chunk, slot = passage.chunk, passage.slot
        grad = slot.gradient(chunk) if ticket.grad is None else ticket.grad[chunk.start : chunk.stop]
        job = chunk.job(grad, slot.states(chunk), slot.param(chunk))
        if chunk.matrix is not None:
            assert self._muon is not None
            updated = self._muon.submit([MatrixJob(chunk.state_format, job, chunk.matrix)], ticket.hyper)
            self.busy_time.begins()
            updated.add_done_callback(lambda updated: self._report(lambda: self._matrix_ended(updated, then)))
            return
        batch = JobBatch(chunk.state_format, [job])
        priority = chunk.unit.index - BEFORE_ALL_UNITS
        submitted = self._pool.submit(chunk.name, priority, batch, ticket.hyper, notify_chunks=True)
        self._under_way[submitted.ticket_id] = (passage, then)
        self.busy_time.begins()
        self._out.release()

    def _ended(self, report: ChunkResult) -> None:
        passage, then = self._under_way.pop(report.ticket.ticket_id)
        self.busy_time.ends()
        if report.status != "done":
            self._pool.wait(report.ticket, self._timeout_s)  # raises what went wrong
            raise EngineError(f"the update of {passage.chunk.name} was {report.status}")
        then()

    def _matrix_ended(self, updated: Future[None], then: Callable[[], None]) -> None:
        self.busy_time.ends()
        updated.result()  # raises what went wrong
        then()

    def _collect(self) -> None:
        """Hand the optimizer's reports of finished chunks to the driver."""
        while True:
            self._out.acquire()
            report = None
            while report is None:
                if self._end.is_set():
                    return
                report = self._pool.next_chunk(REPORT_SLICE_S)
                if report is None:
                    self._end.wait(0.01)  # a closed pool answers at once
            self._report(lambda found=report: self._ended(found))

    def close(self) -> None:
        """Report nothing more; what is under way ends with the pool."""
        self._end.set()
        self._out.release()
        self._thread.join(self._timeout_s)


logger = logging.getLogger(__name__)


class RingSize(NamedTuple):
    """Memory of the ring."""

    n_bytes: int
    max_slots: int


class StateRing:
    """Slots, traffic and the thread that drives both. `submit` and the waits may be called from any thread.

    `flowing`: of each unit, as they become ready, the chunks that pass through the ring.
    `keep_param(chunk, param)`: called with the new parameters of a chunk that has none in RAM, on the driver thread;
    True when it kept a copy for whoever reads them, so that the unit is done before the drive has them.
    `turns`: every unit is submitted in every pass, and each pass goes the other way than the one before (`turn`).
    `muon`: updates chunks that are a matrix with a momentum alone; closed before the ring is."""

    def __init__(
        self,
        homes: ChunkHomes,
        flowing: Sequence[Sequence[StateChunk]],
        pool: OptimizerPool,
        memory: HostMemory,
        size: RingSize,
        *,
        keep_param: Callable[[StateChunk, torch.Tensor], bool] | None = None,
        turns: bool = False,
        muon: MatrixUpdates | None = None,
    ) -> None:
        self._keep_param = keep_param
        self._homes, self._timeout_s = homes, TIMEOUT_S
        order = [chunk for chunks in flowing for chunk in chunks]
        slots = ring_slots(homes, order, memory, *size)
        self.num_slots, self.slot_bytes = len(slots), slots[0].n_bytes
        self.error: BaseException | None = None
        initialise_states(slots, order, TIMEOUT_S)
        # All below belongs to the driver thread.
        self._schedule = RingSchedule(order, slots, self._worth if turns else None)
        self.kept_bytes = sum(chunk.n_bytes for chunk in order if self._schedule.keeps(chunk))
        """Bytes of states kept from one pass to the next (after the first; the way back keeps about as many)."""
        self._idle_waiters: list[threading.Event] = []
        self._write_waiters: list[threading.Event] = []
        self._stopping = False
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._traffic = RingTraffic(self._events.put)
        self._updates = RingUpdates(pool, TIMEOUT_S, self._events.put, muon)
        self._end = threading.Event()
        self._is_idle = False
        self._driver = threading.Thread(target=self._drive, name="state-ring-drive", daemon=True)
        self._driver.start()

    # ------------------------------------------------------------------ called by the engine

    @property
    def read_bytes(self) -> int:
        """Bytes moved by updates, so far."""
        return self._traffic.read_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes written by updates, so far."""
        return self._traffic.written_bytes

    @property
    def optimizer_time(self) -> BusyTime:
        """When the optimizer had a chunk of the ring to work at; otherwise whoever waits, waits for the drive."""
        return self._updates.busy_time

    def begin_step(self) -> None:
        """Read ahead for a new step, from its first unit on."""
        self._events.put(self._schedule.read_ahead)

    def turn(self) -> None:
        """Begin the next pass, once all tickets are done: it goes the other way, and is read ahead as far as slots are
        free."""
        self._events.put(self._turn)

    def passed(self, unit: Updatable) -> None:
        """The unit's gradient is complete; what is read ahead from now on comes after it."""
        self._events.put(lambda: self._schedule.read_ahead_after(unit))

    def submit(
        self, unit: Updatable, flowing: Sequence[StateChunk], grad: torch.Tensor | None, hyper: AdamWHyper
    ) -> RingTicket:
        """Update the unit's chunks that pass through the ring; `grad` stays as it is until the ticket is done.

        None: the gradient is on the drive too (`homes.grad_place`), all of it, and is read from now on."""
        self.check()
        ticket = RingTicket(unit, grad, hyper, list(flowing))
        self._events.put(lambda: self._begin(ticket))
        return ticket

    def wait(self, ticket: RingTicket) -> None:
        """Wait until the unit's parameters may be read. Raises TimeoutError, EngineError."""
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

    def wait_written(self) -> None:
        """Wait until the drive has the parameters of every chunk that was updated so far, and the states of those that
        were not kept; reading ahead goes on. Raises TimeoutError, EngineError."""
        written = threading.Event()
        self._events.put(lambda: self._write_waiters.append(written))
        self._until(written)

    def flush(self) -> None:
        """Wait until the drive has everything and the ring is empty; it stays so until the next step. TimeoutError."""
        idle = threading.Event()
        self._events.put(lambda: self._empty(idle))
        self._until(idle)

    def _until(self, event: threading.Event) -> None:
        if self._end.is_set() or not event.wait(self._timeout_s):  # closed: nobody would answer
            self.check()
            raise TimeoutError(f"the drive did not take what was written to it within {format_s(self._timeout_s)}")
        self.check()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Start nothing more and wait for the transfers under way; False when they did not end: the slots are theirs.

        A second call says the same, without waiting again."""
        if self._end.is_set():
            return self._is_idle
        limit_s = min(timeout_s, self._timeout_s)
        idle = threading.Event()
        self._events.put(lambda: self._stop(idle))
        self._is_idle = idle.wait(limit_s)
        if not self._is_idle:
            logger.error("the drive did not finish transfers of optimizer states within %s", format_s(limit_s))
        self._end.set()
        self._events.put(None)
        self._driver.join(limit_s if self._is_idle else GRACE_S)
        self._updates.close()
        return self._is_idle

    # ------------------------------------------------------------------ the driver thread

    def _drive(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event()
                if self.error is None and not self._stopping:
                    while (passage := self._schedule.next_read()) is not None:
                        self._fetch(passage, passage.slot.reads(passage.chunk) + self._gradient(passage))
                    if self._idle_waiters:
                        self._let_go()
            except BaseException as error:  # delivered to whoever waits
                self._fail(error)
            self._tell_idle()

    def _begin(self, ticket: RingTicket) -> None:
        if self.error is not None or not ticket.left:
            ticket.done.set()
            return
        for passage in self._schedule.add(ticket):
            self._go_on(passage)

    def _go_on(self, passage: ChunkPassage) -> None:
        """Go on: its unit is ready, and its states are in the slot or on their way."""
        gradient = self._gradient(passage)  # read ahead or kept, it came without
        if gradient:
            self._fetch(passage, gradient)
        if passage.is_read:
            self._update(passage)

    def _worth(self, chunk: StateChunk) -> int:
        """Worth of keeping it; states in RAM are kept anyway."""
        return NEVER if chunk.buffer is not None else worth_keeping(needed_bytes(self._homes, chunk), self.slot_bytes)

    def _turn(self) -> None:
        if self.error is None:
            self._schedule.turn()
            self._schedule.read_ahead()

    def _gradient(self, passage: ChunkPassage) -> list[Stretch]:
        """Reads that bring a chunk's gradient, once the gradient is complete."""
        if passage.ticket is None or passage.ticket.grad is not None:
            return []
        return passage.slot.gradient_reads(passage.chunk)

    def _fetch(self, passage: ChunkPassage, parts: list[Stretch]) -> None:
        passage.reads_left += 1
        self._traffic.read(passage.chunk.name, parts, partial(self._arrived, passage))

    def _arrived(self, passage: ChunkPassage) -> None:
        passage.reads_left -= 1
        if passage.ticket is not None and passage.is_read:
            self._update(passage)

    def _update(self, passage: ChunkPassage) -> None:
        assert passage.ticket is not None
        passage.slot.check_states(passage.chunk)
        passage.is_leaving, passage.is_kept = True, False
        self._updates.submit(passage, passage.ticket, partial(self._updated, passage, passage.ticket))

    def _updated(self, passage: ChunkPassage, ticket: RingTicket) -> None:
        chunk, slot = passage.chunk, passage.slot
        slot.updated(chunk)
        waits_for_drive = slot.holds_param(chunk)
        if waits_for_drive and self._keep_param is not None:
            waits_for_drive = not self._keep_param(chunk, slot.param(chunk))
        if not waits_for_drive:
            self._schedule.count_down(ticket)
        if self._stopping or self.error is not None:
            return
        is_kept = passage.is_staying = self._schedule.keeps(chunk)
        parts = slot.param_writes(chunk) if is_kept else slot.state_writes(chunk) + slot.param_writes(chunk)
        done = partial(self._written, passage, ticket if waits_for_drive else None, is_kept=is_kept)
        self._traffic.write(chunk.name, parts, done)

    def _written(self, passage: ChunkPassage, ticket: RingTicket | None, *, is_kept: bool) -> None:
        if ticket is not None:
            self._schedule.count_down(ticket)
        if not is_kept:
            self._schedule.leave(passage)
        elif self._schedule.keep(passage):
            self._go_on(passage)

    def _let_go(self) -> None:
        """Write the chunks that were kept in slots to the drive."""
        for passage in self._schedule.kept:
            passage.is_leaving = True
            parts = passage.slot.state_writes(passage.chunk)
            self._traffic.write(passage.chunk.name, parts, partial(self._schedule.leave, passage))

    def _empty(self, idle: threading.Event) -> None:
        self._schedule.stop_reading_ahead()
        self._idle_waiters.append(idle)

    def _stop(self, idle: threading.Event) -> None:
        self._stopping = True
        self._fail(RuntimeError("the engine was closed"))
        self._idle_waiters.append(idle)

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self._schedule.abandon()

    def _tell_idle(self) -> None:
        if self._write_waiters and (self.error is not None or not self._schedule.is_writing):
            for waiter in self._write_waiters:
                waiter.set()
            self._write_waiters = []
        if not self._idle_waiters:
            return
        self._schedule.drop_unwanted()
        if self._traffic.is_idle and (self.error is not None or self._schedule.is_empty):
            for idle in self._idle_waiters:
                idle.set()
            self._idle_waiters = []
