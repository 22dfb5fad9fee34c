"""Protocol of an implementation of the optimizer: the C++ extension and torch are two of them, with the same bits.

A pool asks its backend for a queue with workers (`WorkQueue`); everything that waits is in `OptimizerPool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from outcore.optim.formats import StateFormat
from outcore.optim.hyper import AdamWHyper
from outcore.optim.jobs import ChunkJob, JobBatch

Work = Literal["update", "guarded_update", "sum_squares", "add_up"]
Status = Literal["done", "skipped", "cancelled", "failed"]
BackendName = Literal["auto", "extension", "torch"]


class GradStats(NamedTuple):
    """Statistics of one gradient or of a unit's."""

    sumsq: float
    """Sum of squares in double precision, in an order that no number of threads changes; NaN when not all finite."""
    all_finite: bool


@dataclass(frozen=True)
class FinishedUnit:
    """Report of a queue about a unit; times are those of time.perf_counter."""

    ticket_id: int
    status: Status
    stats: GradStats | None
    started_s: float
    finished_s: float
    busy_s: float
    error: BaseException | None = None


class FinishedChunk(NamedTuple):
    ticket_id: int
    chunk_index: int
    status: Status
    finished_s: float


class WorkQueue(Protocol):
    """Workers and units in order of need. All methods may be called from any thread; only the waits block."""

    def submit(
        self, priority: int, batch: JobBatch, hyper: AdamWHyper | None, work: Work, notify_chunks: bool
    ) -> int: ...
    def wait_finished(self, seen: int, timeout_s: float) -> int: ...
    def reap(self) -> list[FinishedUnit]: ...
    def next_chunk(self, timeout_s: float) -> FinishedChunk | None: ...
    def stop(self, timeout_s: float) -> bool:
        """End the workers after the tasks they are at. False: one has not ended, and uses its task's memory."""
        ...

    def delete(self) -> None: ...


class Backend(Protocol):
    """An implementation."""

    name: str
    """'extension (avx512)', 'torch', ..."""

    def update(self, state_format: StateFormat, job: ChunkJob, hyper: AdamWHyper) -> None:
        """AdamW on one chunk on the calling thread."""
        ...

    def grad_sumsq_and_finite(self, grad: torch.Tensor, num_threads: int = 1) -> GradStats: ...

    def expand(
        self,
        state_format: StateFormat,
        state: torch.Tensor,
        exp_avg: torch.Tensor | None = None,
        exp_avg_sq: torch.Tensor | None = None,
    ) -> None:
        """The moments in the chunk `state` of a compressed format, as fp32 into those of the two that are given."""
        ...

    def compress(
        self, state_format: StateFormat, state: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
    ) -> None:
        """Set both moments of the chunk from fp32."""
        ...

    def new_queue(self, num_threads: int, cpus: Sequence[int] | None, task_numel: int) -> WorkQueue: ...
