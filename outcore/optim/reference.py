"""The optimizer in torch: the same bits as the C++ extension, slower. Used where there is no compiler, and to test it.

Only element-wise torch operations that round once are used (multiply, add, subtract, divide, compare); not `lerp` and
`addcmul`, which fuse where the processor can, and not fp32 `sqrt`, which is off by an ulp for one number in six with
the vector library of torch's x86 wheels (M, 2.13). Cost: about 40 passes over a slice of 2^18 elements, which stays in
the cache.

It needs denormals: a process that flushes them (torch.set_flush_denormal(True)) gets other bits; the extension does
not.

The optimizer without a compiler: `reference.py` behind the same interface, workers as Python threads.

torch releases the GIL inside its operations, so several workers help a little; the GIL is needed between them. Tasks
are whole chunks."""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outcore.optim.backend import FinishedChunk, FinishedUnit, GradStats, Status, Work
from outcore.optim.formats import BLOCK_NUMEL, StateFormat
from outcore.optim.formats.chunk_state import cast_param, join_master, one_nan, round_to_24_bits, split_master
from outcore.optim.formats.compressed import compress_moments, expand_moments
from outcore.optim.formats.state_format import (
    SMALLEST_EXP_AVG,
    SMALLEST_EXP_AVG_SQ,
    Codes,
    exact_sqrt,
    pack_stochastic,
    random_bytes,
    unpack,
)
from outcore.optim.hyper import AdamWHyper, AdamWScalars
from outcore.optim.jobs import ChunkJob, JobBatch, by_decay, check_grad

SLICE_NUMEL = 1 << 18  # small enough that 40 passes over it stay in the cache
SUM_BLOCK_NUMEL = 4096
SUM_LANES = 64
SMALLEST_NORMAL = 2.0**-126
LARGEST_GRAD = 2.0**60
"""Scaled gradients above it are refused like infinity: their square would overflow the second moment."""


def update_chunk(state_format: StateFormat, job: ChunkJob, hyper: AdamWHyper) -> None:
    """AdamW on one chunk. The arguments come from a checked `JobBatch`."""
    numel, state = job.grad.numel(), job.state
    if job.kept is not None and job.param is not None:
        job.kept.copy_(job.param)
    if job.next is not None:
        state = job.next
        state[: state_format.chunk_bytes(numel)].copy_(job.state[: state_format.chunk_bytes(numel)])
    views = state_format.views(state, numel)
    if state_format.compressed:
        moments = {name: torch.empty(numel, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        expand_moments(state_format, job.state, **moments)
        views = {name: view for name, view in views.items() if name in ("master", "residual")} | moments
    grad = job.grad.detach().reshape(-1)
    param = None if job.param is None else job.param.detach().view(-1)
    scalars = hyper.scalars()
    for begin, end, decays in by_decay(job):
        of_these = scalars if decays else scalars._replace(decay=1.0)
        for start in range(begin, end, SLICE_NUMEL):
            at = slice(start, min(start + SLICE_NUMEL, end))
            blocks = slice(start // BLOCK_NUMEL, -(-at.stop // BLOCK_NUMEL))
            part = {name: view[blocks if name.endswith("_scale") else at] for name, view in views.items()}
            first_block = (job.element_offset + start) // BLOCK_NUMEL
            kept = None if param is None else param[at]
            _update_slice(state_format.plain, part, kept, grad[at], hyper, of_these, first_block)
    if state_format.compressed:
        compress_moments(state_format, job.state, views["exp_avg"], views["exp_avg_sq"])


def _update_slice(
    state_format: StateFormat,
    part: dict[str, torch.Tensor],
    param: torch.Tensor | None,
    grad: torch.Tensor,
    hyper: AdamWHyper,
    scalars: AdamWScalars,
    first_block: int,
) -> None:
    if state_format.split_master:
        assert param is not None
        master = join_master(param, part["residual"])
    else:
        master = part["master"]
    if state_format.moments8:
        codes = Codes(*(part[name] for name in Codes._fields))
        exp_avg, exp_avg_sq = unpack(codes)
        master, exp_avg, _, root = adamw(
            master, exp_avg, exp_avg_sq, grad, scalars, SMALLEST_EXP_AVG, SMALLEST_EXP_AVG_SQ
        )
        packed = pack_stochastic(exp_avg, root, seed=hyper.seed, step=hyper.step, first_block=first_block)
        for target, value in zip(codes, packed):
            target.copy_(value)
    else:
        master, exp_avg, exp_avg_sq, _ = adamw(
            master, part["exp_avg"], part["exp_avg_sq"], grad, scalars, SMALLEST_NORMAL, SMALLEST_NORMAL
        )
        part["exp_avg"].copy_(exp_avg)
        part["exp_avg_sq"].copy_(exp_avg_sq)
    if state_format.split_master:
        assert param is not None
        if state_format.short_residual:
            random = random_bytes(master.numel(), seed=hyper.seed, step=hyper.step, first_block=first_block)
            master = round_to_24_bits(master, random)
        high, residual = split_master(master, state_format.residual_dtype)
        param.copy_(high)
        part["residual"].copy_(residual)
    else:
        part["master"].copy_(master)
        if param is not None:
            param.copy_(cast_param(master, param.dtype))


def adamw(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamWScalars,
    smallest_exp_avg: float,
    smallest_exp_avg_sq: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(w, m, v, sqrt(v)) after the update, fp32 [n] each; the formula is in `hyper.py`."""
    g = grad.float() * scalars.grad_scale
    base = g if scalars.lerp_from_grad else exp_avg
    m = _tidy(base + (g - exp_avg) * scalars.lerp_coefficient, smallest_exp_avg)
    v = _tidy(exp_avg_sq * scalars.beta2 + (g * scalars.one_minus_beta2) * g, smallest_exp_avg_sq)
    root = exact_sqrt(v)
    denominator = root / scalars.bias_correction2_sqrt + scalars.eps
    w = master * scalars.decay + (m * scalars.negative_step_size) / denominator
    return one_nan(w), m, v, root


def sum_squares(grad: torch.Tensor) -> tuple[float, bool, float]:
    """(sum of squares, all finite, largest magnitude) of a gradient; NaN as sum when something is not finite."""
    flat = grad.detach().reshape(-1)
    total, largest = 0.0, 0.0
    for start in range(0, flat.numel(), SLICE_NUMEL):
        part = flat[start : start + SLICE_NUMEL].float()
        top = float(part.abs().max())
        if not math.isfinite(top):
            return math.nan, False, math.inf
        largest = max(largest, top)
        for partial in _block_sums(part):
            total += partial
    return total, True, largest


def add_up(sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """`into` <- the sum of `sources` in fp32, in their order, rounded once."""
    for start in range(0, len(into), SLICE_NUMEL):
        piece = slice(start, start + SLICE_NUMEL)
        total = sources[0][piece].to(torch.float32, copy=True)
        for source in sources[1:]:
            total += source[piece].float()
        into[piece].copy_(total)


def _block_sums(part: torch.Tensor) -> list[float]:
    """Per 4096 elements: 64 lanes that each add 64 squares one after the other, then halves added until one is left."""
    padded = torch.nn.functional.pad(part, (0, -part.numel() % SUM_BLOCK_NUMEL))
    squares = padded.double().square_().view(-1, SUM_BLOCK_NUMEL // SUM_LANES, SUM_LANES)  # [blocks, rows, lanes]
    lanes = squares[:, 0].clone()
    for row in range(1, squares.shape[1]):
        lanes += squares[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0].tolist()


def _tidy(x: torch.Tensor, smallest: float) -> torch.Tensor:
    return one_nan(torch.where(x.abs() < smallest, 0.0, x))


class TorchBackend:
    """The torch implementation."""

    name = "torch"

    def update(self, state_format: StateFormat, job: ChunkJob, hyper: AdamWHyper) -> None:
        hyper.check_moments(state_format.moments8)
        JobBatch(state_format, [job])
        update_chunk(state_format, job, hyper)

    def grad_sumsq_and_finite(self, grad: torch.Tensor, num_threads: int = 1) -> GradStats:
        check_grad(grad)
        total, all_finite, _ = sum_squares(grad)
        return GradStats(total, all_finite)

    def expand(
        self,
        state_format: StateFormat,
        state: torch.Tensor,
        exp_avg: torch.Tensor | None = None,
        exp_avg_sq: torch.Tensor | None = None,
    ) -> None:
        expand_moments(state_format, state, exp_avg, exp_avg_sq)

    def compress(
        self, state_format: StateFormat, state: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
    ) -> None:
        compress_moments(state_format, state, exp_avg, exp_avg_sq)

    def new_queue(self, num_threads: int, cpus: Sequence[int] | None, task_numel: int) -> TorchQueue:
        return TorchQueue(num_threads)


@dataclass
class _Unit:
    ticket_id: int
    priority: int
    batch: JobBatch
    hyper: AdamWHyper | None
    work: Work
    notify: bool
    scanning: bool
    next_chunk: int = 0
    chunks_left: int = 0
    started_s: float = 0.0
    busy_s: float = 0.0
    largest: float = 0.0
    sums: list[tuple[float, bool]] = field(default_factory=list)
    stats: GradStats | None = None
    error: BaseException | None = None


class TorchQueue:
    """The queue of `pool.cpp` in Python: same order, same reports."""

    def __init__(self, num_threads: int) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[int, int]] = []  # priority, ticket
        self._units: dict[int, _Unit] = {}
        self._finished: list[FinishedUnit] = []
        self._num_finished = 0
        self._chunks: list[FinishedChunk] = []
        self._last_ticket = 0
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"optimizer-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, priority: int, batch: JobBatch, hyper: AdamWHyper | None, work: Work, notify_chunks: bool) -> int:
        with self._changed:
            if self._stopping:
                raise RuntimeError("the CPU optimizer refused: its pool was stopped")
            self._last_ticket += 1
            unit = _Unit(
                self._last_ticket,
                priority,
                batch,
                hyper,
                work,
                notify_chunks and work in ("update", "guarded_update"),
                work != "update",
                chunks_left=len(batch),
                sums=[(0.0, True)] * len(batch),
            )
            self._units[unit.ticket_id] = unit
            heapq.heappush(self._heap, (priority, unit.ticket_id))
            self._changed.notify_all()
            return unit.ticket_id

    def wait_finished(self, seen: int, timeout_s: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._num_finished > seen or self._stopping, timeout_s)
            return self._num_finished

    def reap(self) -> list[FinishedUnit]:
        with self._changed:
            found, self._finished = self._finished, []
            return found

    def next_chunk(self, timeout_s: float) -> FinishedChunk | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._chunks) or self._stopping, timeout_s)
            return self._chunks.pop(0) if self._chunks else None

    def stop(self, timeout_s: float) -> bool:
        end_s = time.perf_counter() + timeout_s
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, end_s - time.perf_counter()))
        if any(thread.is_alive() for thread in others):
            return False
        with self._changed:
            for unit in list(self._units.values()):
                self._finish(unit, "cancelled")
        return True

    def delete(self) -> None:
        """Nothing is held beyond `stop`."""

    def _take(self) -> tuple[_Unit, int] | None:
        """The next chunk of the unit needed first; waits for one, None when stopping. Holds the lock."""
        while not self._stopping:
            while self._heap:
                _, ticket_id = self._heap[0]
                unit = self._units.get(ticket_id)
                if unit is None or unit.next_chunk >= len(unit.batch):
                    heapq.heappop(self._heap)
                    continue
                unit.next_chunk += 1
                return unit, unit.next_chunk - 1
            self._changed.wait()
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                taken = self._take()
            if taken is None:
                return
            unit, index = taken
            began_s = time.perf_counter()
            error: BaseException | None = None
            largest, scanned = 0.0, (0.0, True)
            try:
                if unit.error is not None:
                    pass  # the unit has failed: leave the rest as it is
                elif unit.scanning:
                    if unit.work == "add_up":
                        add_up(unit.batch.sources, unit.batch.grads[index])
                    total, all_finite, largest = sum_squares(unit.batch.grads[index])
                    scanned = (total, all_finite)
                else:
                    assert unit.batch.state_format is not None and unit.hyper is not None
                    update_chunk(unit.batch.state_format, unit.batch.jobs[index], unit.hyper)
            except BaseException as caught:  # delivered to whoever waits for the unit
                error = caught
            ended_s = time.perf_counter()
            with self._changed:
                unit.error = unit.error or error
                unit.started_s = min(unit.started_s or began_s, began_s)
                unit.busy_s += ended_s - began_s
                unit.largest = max(unit.largest, largest)
                if unit.scanning:
                    unit.sums[index] = scanned
                elif unit.notify:
                    self._push_chunk(unit, index, "done" if unit.error is None else "failed")
                unit.chunks_left -= 1
                if unit.chunks_left == 0:
                    self._finish_phase(unit)

    def _finish_phase(self, unit: _Unit) -> None:
        if unit.error is None and unit.scanning:
            all_finite = all(finite for _, finite in unit.sums)
            unit.stats = GradStats(_add([total for total, _ in unit.sums]) if all_finite else float("nan"), all_finite)
            if unit.work == "guarded_update":
                assert unit.hyper is not None
                if all_finite and unit.largest * unit.hyper.scalars().grad_scale <= LARGEST_GRAD:
                    unit.scanning, unit.next_chunk, unit.chunks_left = False, 0, len(unit.batch)
                    heapq.heappush(self._heap, (unit.priority, unit.ticket_id))
                    self._changed.notify_all()
                    return
                self._push_all(unit, "skipped")
                self._finish(unit, "skipped")
                return
        if unit.error is not None and unit.scanning:
            self._push_all(unit, "failed")
        self._finish(unit, "done" if unit.error is None else "failed")

    def _push_all(self, unit: _Unit, status: Status) -> None:
        for index in range(len(unit.batch) if unit.notify else 0):
            self._push_chunk(unit, index, status)

    def _push_chunk(self, unit: _Unit, index: int, status: Status) -> None:
        self._chunks.append(FinishedChunk(unit.ticket_id, index, status, time.perf_counter()))
        self._changed.notify_all()

    def _finish(self, unit: _Unit, status: Status) -> None:
        del self._units[unit.ticket_id]
        self._finished.append(
            FinishedUnit(
                unit.ticket_id, status, unit.stats, unit.started_s, time.perf_counter(), unit.busy_s, unit.error
            )
        )
        self._num_finished += 1
        self._changed.notify_all()


def _add(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total
