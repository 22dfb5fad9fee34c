"""What is under way of the state ring: reads and writes of parts of a chunk, and chunks at the optimizer.

The end of each is told to the driver thread. A chunk at the optimizer is a batch of its own; the pool reports finished
ones one by one to whoever asks: a thread of its own here, which asks while any is out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from outcore.common.errors import EngineError
from outcore.flow.trace import BusyTime
from outcore.optim import ChunkResult, JobBatch, MatrixJob, MatrixUpdates, OptimizerPool
from outcore.states.ring.schedule import ChunkPassage, RingTicket
from outcore.states.ring.slots import Stretch
from outcore.storage import Transfer, gather

BEFORE_ALL_UNITS = 1 << 20
"""Chunks of the ring are updated before those in RAM, of whatever unit: the drive waits for their slots."""
REPORT_SLICE_S = 0.2
"""How often the wait for the optimizer looks whether the ring is being closed."""


class RingTraffic:
    """`report(event)`: have the driver thread call `event`. All methods are called on that thread."""

    def __init__(self, report: Callable[[Callable[[], None]], None]) -> None:
        self._report = report
        self._under_way = 0
        self.read_bytes = self.written_bytes = 0
        """So far."""

    @property
    def is_idle(self) -> bool:
        """Whether the drive uses no slot's memory."""
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
