"""What a pool hands out: a ticket per submitted unit, its result, reports of chunks, and the errors of waiting."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from outcore.optim.backend import GradStats, Status, Work


class UpdateFailed(RuntimeError):
    """A unit's update raised; its states are partly updated and must be restored from a checkpoint."""


class PoolClosed(RuntimeError):
    """The pool was closed before this."""


@dataclass(frozen=True)
class UnitResult:
    """What became of a unit."""

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
