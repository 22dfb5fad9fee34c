"""Optimizer threads: one call submits a unit (a layer's chunks); they are worked off in order of need without the GIL.

Order: lowest `priority` first (the layer that the next forward needs soonest), then order of submission. Work is cut
into tasks of at most `task_numel` elements, so that a unit needed sooner gets the threads within milliseconds and one
large chunk uses all of them. Results do not depend on threads, order or task size.

    with OptimizerPool(num_threads=14) as pool:
        ticket = pool.submit("layer 3", 3, JobBatch(SPLIT, jobs), hyper)
        ...
        pool.wait(ticket, timeout_s=60)

States on NVMe: submit with `notify_chunks=True` and write each chunk back as `next_chunk` returns it. Guarded updates
first look at every gradient of the unit and skip the whole unit when one is not finite (or above 2^60, whose square
overflows): a bad gradient never reaches the states. Tensors are kept alive until their unit has finished; until then
their contents belong to the pool. Every wait is bounded. Without a compiler the same class works with torch on Python
threads, with the same bits.

An update made before the clipping factor is known cannot be undone by arithmetic: m and v are contractions that merge
neighbouring numbers, and w rounds. Double precision finds the old m, v and w in 67, 74 and 75 % of cases (M); the rest
is off by units in the last place, m by far more where it cancelled; residuals would be 4 bits a parameter (entropy, M)
with an escape for outliers. So such an update writes its states to other buffers (`JobBatch.ahead`) and keeps the old
parameters. Only these are extra bytes, and both together are enough to take the update back.

What a pool hands out: a ticket per submitted unit, its result, reports of chunks, and the errors of waiting."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import format_s
from outcore.machine import usable_cores
from outcore.optim.backend import Backend, BackendName, FinishedUnit, GradStats, Status, Work, WorkQueue
from outcore.optim.choice import open_backend
from outcore.optim.hyper import AdamWHyper
from outcore.optim.jobs import JobBatch


class UpdateFailed(RuntimeError):
    """A unit's update raised; its states are partly updated and must be restored from a checkpoint."""


class PoolClosed(RuntimeError):
    """The pool was closed before this."""


@dataclass(frozen=True)
class UnitResult:
    """Result of a unit's update."""

    unit_id: Hashable
    status: Status
    """'done'; 'skipped': guarded and a gradient was not finite, nothing was changed; 'cancelled' by close."""
    stats: GradStats | None
    """Statistics of the unit's gradients, for guarded updates and sums of squares."""
    started_s: float
    """First task's start and last one's end, on the clock of time.perf_counter (for a trace)."""
    finished_s: float
    busy_s: float
    """Summed over the threads."""


class Ticket:
    """A submitted unit; `result` is set once it was waited for or seen to be done."""

    def __init__(self, ticket_id: int, unit_id: Hashable, work: Work) -> None:
        self.ticket_id = ticket_id
        self.unit_id = unit_id
        self.work: Work = work
        self.result: UnitResult | None = None
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        state = "pending" if self.result is None else self.result.status
        return f"Ticket({self.ticket_id}, unit {self.unit_id!r}, {self.work}, {state})"


@dataclass(frozen=True)
class ChunkResult:
    """A chunk whose states and parameters may be written back now (or were left alone: 'skipped')."""

    ticket: Ticket
    chunk_index: int
    status: Status
    finished_s: float


DEFAULT_TASK_NUMEL = 1 << 18
"""2^18 parameters are 7 MB of traffic: under 2 ms of a thread, against a microsecond to hand it out."""
SUM_BLOCK_NUMEL = 4096
SIGNAL_SLICE_S = 0.2
"""Waits return to Python this often, so that Ctrl-C works."""
DISPOSE_TIMEOUT_S = 60.0
"""Seconds that the tasks of a pool which nobody closed may take to end."""

_left: list[OptimizerPool] = []
"""Pools with a thread that did not end: it may write to their tensors for as long as the process lives."""


@dataclass
class _Live:
    """A ticket with what it keeps alive."""

    ticket: Ticket
    batch: JobBatch | None
    chunks_left: int


def default_num_threads(cores_left: int = 2) -> int:
    """Count the cores that this process may use, less `cores_left`, for I/O and the training thread; at least one."""
    return max(1, usable_cores() - cores_left)


class OptimizerPool:
    """Threads that update chunks. Methods may be called from any thread.

    - `num_threads`: workers (default: all cores but two). DRAM is saturated by fewer. On Linux the extension's go
      behind other threads (a nice value higher by 5), which launch kernels and move bytes.
    - `backend`: "auto", "extension", "torch", or an opened `Backend`.
    - `cpus`: one CPU number per worker to pin it to (extension only); default: the system's scheduler decides.
    - `task_numel`: elements per task, a multiple of 4096.

    Raises ValueError for settings, ExtensionUnavailable, RuntimeError when threads cannot be started.
    """

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        backend: BackendName | Backend = "auto",
        cpus: Sequence[int] | None = None,
        task_numel: int = DEFAULT_TASK_NUMEL,
    ) -> None:
        self.num_threads = default_num_threads() if num_threads is None else num_threads
        if not 1 <= self.num_threads <= 1024:
            raise ValueError(f"an optimizer pool needs 1 to 1024 threads, got {self.num_threads}")
        if task_numel <= 0 or task_numel % SUM_BLOCK_NUMEL:
            raise ValueError(f"task_numel must be a positive multiple of {SUM_BLOCK_NUMEL}, got {task_numel}")
        if cpus is not None:
            _check_cpus(cpus, self.num_threads)
        self.backend: Backend = open_backend(backend) if isinstance(backend, str) else backend
        self._queue: WorkQueue = self.backend.new_queue(self.num_threads, cpus, task_numel)
        self._lock = threading.Lock()
        self._live: dict[int, _Live] = {}
        self._pending: dict[int, _Live] = {}
        self._num_reaped = 0
        self._closed = False
        self.on_finished: Callable[[Ticket], object] | None = None
        """Hears of every unit whose work has ended, once, on whichever thread notices (for a trace)."""
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _dispose, self._queue, self._pid)

    def submit(
        self,
        unit_id: Hashable,
        priority: int,
        jobs: JobBatch,
        hyper: AdamWHyper,
        *,
        guard: bool = False,
        notify_chunks: bool = False,
    ) -> Ticket:
        """Queue AdamW on a unit's chunks; returns at once.

        `guard`: skip the unit when a gradient is not finite. `notify_chunks`: each chunk is reported by `next_chunk`,
        and someone must take those reports.
        """
        if jobs.state_format is None:
            raise ValueError("these jobs have gradients only; an update needs JobBatch(format, jobs)")
        hyper.check_moments(jobs.state_format.moments8)
        return self._submit(unit_id, priority, jobs, hyper, "guarded_update" if guard else "update", notify_chunks)

    def submit_sumsq(self, unit_id: Hashable, priority: int, grads: Sequence[torch.Tensor]) -> Ticket:
        """Queue the sum of squares of a unit's gradients and whether all are finite. The result's `stats` have both.
        The sums of the gradients (`grad_sumsq_and_finite`) are added in their order."""
        return self._submit(unit_id, priority, JobBatch.of_grads(grads), None, "sum_squares", False)

    def submit_add_up(
        self, unit_id: Hashable, priority: int, sources: Sequence[torch.Tensor], into: torch.Tensor
    ) -> Ticket:
        """Queue `into` <- the sum of `sources`, in fp32 in their order, rounded once to nearest as torch does. The
        result's `stats` are of the rounded values."""
        return self._submit(unit_id, priority, JobBatch.of_sum(sources, into), None, "add_up", False)

    def wait(self, ticket: Ticket, timeout_s: float = TIMEOUT_S) -> UnitResult:
        """Wait for its result. TimeoutError, UpdateFailed, or PoolClosed when the pool was closed before it had
        finished."""
        self.wait_any([ticket], timeout_s)
        assert ticket.result is not None
        if ticket.error is not None:
            raise UpdateFailed(
                f"the update of unit {ticket.unit_id!r} failed ({type(ticket.error).__name__}: {ticket.error}); its "
                "states may be partly updated: resume from the last checkpoint"
            ) from ticket.error
        if ticket.result.status == "cancelled":
            raise PoolClosed(f"the optimizer pool was closed before unit {ticket.unit_id!r} had finished")
        return ticket.result

    def done(self, ticket: Ticket) -> bool:
        """Whether it has finished in whatever way; does not block."""
        if ticket.result is None:
            self._reap()
        return ticket.result is not None

    def wait_any(self, tickets: Sequence[Ticket], timeout_s: float = TIMEOUT_S) -> Ticket:
        """The first of `tickets` (in their order) that has finished in whatever way; TimeoutError."""
        if not tickets:
            raise ValueError("wait_any needs at least one ticket")
        found: list[Ticket] = []

        def one_is_done() -> bool:
            found.extend(ticket for ticket in tickets if ticket.result is not None)
            return bool(found)

        self._wait_for(one_is_done, timeout_s, f"one of {len(tickets)} units, the first {tickets[0].unit_id!r}")
        return found[0]

    def drain(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until everything submitted so far has finished; TimeoutError. Failures stay with their tickets."""
        self._reap()
        with self._lock:
            waited = list(self._pending.values())
        self._wait_for(
            lambda: all(live.ticket.result is not None for live in waited), timeout_s, f"{len(waited)} units to drain"
        )

    def next_chunk(self, timeout_s: float) -> ChunkResult | None:
        """The next chunk of a unit submitted with `notify_chunks`, in order of completion; None after the timeout."""
        deadline_s = time.perf_counter() + timeout_s
        while True:
            self._check_process()
            left_s = deadline_s - time.perf_counter()
            chunk = self._queue.next_chunk(max(0.0, min(SIGNAL_SLICE_S, left_s)))
            if chunk is not None:
                break
            if left_s <= 0 or self._closed:
                return None
        with self._lock:
            live = self._live[chunk.ticket_id]
            live.chunks_left -= 1
            self._forget_if_over(live)
        return ChunkResult(live.ticket, chunk.chunk_index, chunk.status, chunk.finished_s)

    @property
    def num_pending(self) -> int:
        """Units submitted and not finished."""
        self._reap()
        return len(self._pending)

    @property
    def num_finished(self) -> int:
        """Units that have finished in whatever way since the pool was made."""
        return self._reap()

    def wait_for_more(self, seen: int, timeout_s: float) -> None:
        """Wait until more than `seen` units have finished, or the timeout; without the interpreter's lock."""
        if not self._closed:
            self._queue.wait_finished(seen, timeout_s)

    def close(self, timeout_s: float = TIMEOUT_S, *, cancel: bool = False) -> None:
        """End the threads: after everything submitted, or with `cancel` after the tasks they are at.

        A cancelled unit may be partly updated. TimeoutError: a task is still running after `timeout_s`, and the tensors
        of its unit stay until the process ends. Calling it again does nothing.
        """
        if self._closed or os.getpid() != self._pid:
            return
        end_s = time.perf_counter() + timeout_s
        if not cancel:
            self.drain(timeout_s)
        self._closed = True
        if not self._stop(end_s):
            self._finalizer.detach()
            _left.append(self)
            raise TimeoutError(
                f"a thread of the CPU optimizer ({self.backend.name}) did not end within {format_s(timeout_s)}: the "
                "memory it works on stays until the process ends"
            )
        self._reap()

    def _stop(self, end_s: float) -> bool:
        while not self._queue.stop(SIGNAL_SLICE_S):  # one slice at least: idle threads have to wake up to end
            if time.perf_counter() >= end_s:
                return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        self.close(cancel=kind is not None)

    def _submit(
        self,
        unit_id: Hashable,
        priority: int,
        batch: JobBatch,
        hyper: AdamWHyper | None,
        work: Work,
        notify_chunks: bool,
    ) -> Ticket:
        self._check_open()
        with self._lock:  # a chunk's report may come before this returns: next_chunk looks it up under the lock
            ticket_id = self._queue.submit(priority, batch, hyper, work, notify_chunks)
            ticket = Ticket(ticket_id, unit_id, work)
            live = _Live(ticket, batch, len(batch) if notify_chunks else 0)
            self._live[ticket_id] = self._pending[ticket_id] = live
        self._reap()
        return ticket

    def _reap(self) -> int:
        """Take over what has finished; the number of units finished so far."""
        with self._lock:
            for finished in self._queue.reap():
                self._num_reaped += 1
                live = self._pending.pop(finished.ticket_id)
                self._finish(live, finished)
            return self._num_reaped

    def _finish(self, live: _Live, finished: FinishedUnit) -> None:
        live.batch = None
        live.ticket.error = finished.error
        live.ticket.result = UnitResult(
            live.ticket.unit_id,
            finished.status,
            finished.stats,
            finished.started_s,
            finished.finished_s,
            finished.busy_s,
        )
        self._forget_if_over(live)
        if self.on_finished is not None:
            self.on_finished(live.ticket)

    def _forget_if_over(self, live: _Live) -> None:
        if live.chunks_left == 0 and live.ticket.result is not None:
            self._live.pop(live.ticket.ticket_id, None)

    def _wait_for(self, condition, timeout_s: float, what: str) -> None:
        deadline_s = time.perf_counter() + timeout_s
        while True:
            seen = self._reap()
            if condition():
                return
            if self._closed:
                raise PoolClosed(f"the optimizer pool was closed while {what} had not finished")
            self._check_process()
            left_s = deadline_s - time.perf_counter()
            if left_s <= 0:
                raise TimeoutError(
                    f"the optimizer did not finish {what} within {format_s(timeout_s)}: {len(self._pending)} units are "
                    f"pending on {self.num_threads} threads ({self.backend.name}); the machine is overloaded or out of "
                    "RAM, or a gradient was submitted that is still far from its turn"
                )
            self._queue.wait_finished(seen, min(SIGNAL_SLICE_S, left_s))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("this optimizer pool belongs to the process that forked this one; make one here")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise PoolClosed("the optimizer pool is closed")


def _dispose(queue: WorkQueue, pid: int) -> None:
    if os.getpid() == pid and queue.stop(DISPOSE_TIMEOUT_S):  # threads do not survive a fork
        queue.delete()


def _check_cpus(cpus: Sequence[int], num_threads: int) -> None:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    if len(cpus) != num_threads or not set(cpus) <= allowed:
        raise ValueError(
            f"cpus must name one of {sorted(allowed)} for each of {num_threads} threads, got {list(cpus)}; leave it "
            "out to let the system decide"
        )
