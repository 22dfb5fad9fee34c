"""The C++ extension through ctypes, which releases the GIL for the length of every call."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from outcore.optim.backend import FinishedChunk, FinishedUnit, GradStats, Status, Work
from outcore.optim.build import BUILD_COMMAND, ExtensionUnavailable, build_extension
from outcore.optim.formats import StateFormat, tail_of
from outcore.optim.formats.compressed import check_moments, check_unsigned
from outcore.optim.hyper import AdamWHyper
from outcore.optim.jobs import DTYPE_CODES, ChunkJob, CJob, JobBatch, check_grad

ABI = 7
VARIANT_NAMES = ("baseline", "avx2", "avx512")
WORK_CODES: dict[str, int] = {"update": 0, "guarded_update": 1, "sum_squares": 2, "add_up": 3}
STATUSES: tuple[Status, ...] = ("done", "skipped", "cancelled")
REAP_CAPACITY = 64
LAYOUT_NAMES = (
    "master",
    "exp_avg",
    "exp_avg_sq",
    "exp_avg_scale",
    "exp_avg_sq_scale",
    "block_heads",
    "chunk_head",
    "tails",
    "tail_bytes",
    "total",
)


class CHyper(ctypes.Structure):
    """abi.h: Hyper."""

    _fields_ = (
        ("grad_scale", ctypes.c_float),
        ("lerp_coefficient", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("bias_correction2_sqrt", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("negative_step_size", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("lerp_from_grad", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_int64),
    )


class CTypes(ctypes.Structure):
    """abi.h: Types."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("param_dtype", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    )


class CFinished(ctypes.Structure):
    """pool.h: Finished."""

    _fields_ = (
        ("ticket", ctypes.c_uint64),
        ("sum_squares", ctypes.c_double),
        ("started_s", ctypes.c_double),
        ("finished_s", ctypes.c_double),
        ("busy_s", ctypes.c_double),
        ("status", ctypes.c_int32),
        ("all_finite", ctypes.c_int32),
    )


class CChunkDone(ctypes.Structure):
    """pool.h: ChunkDone."""

    _fields_ = (
        ("ticket", ctypes.c_uint64),
        ("chunk", ctypes.c_int64),
        ("finished_s", ctypes.c_double),
        ("status", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    )


class CLayout(ctypes.Structure):
    """abi.h: Layout."""

    _fields_ = tuple((name, ctypes.c_int64) for name in LAYOUT_NAMES)


def load_library(path: Path) -> ctypes.CDLL:
    """The built library with its functions declared. ExtensionUnavailable when it does not load here."""
    try:
        library = ctypes.CDLL(str(path))
        abi = library.outcore_optim_abi()
    except (OSError, AttributeError) as error:
        raise ExtensionUnavailable(
            f"the CPU optimizer was built but does not load: {error}. Remove {path.parent} and run: {BUILD_COMMAND}"
        ) from error
    if abi != ABI:
        raise ExtensionUnavailable(
            f"{path} has interface {abi}, this version needs {ABI}. Remove {path.parent} and run: {BUILD_COMMAND}"
        )
    p, i32, i64, u64, f64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_double
    for name, returns, arguments in (
        ("best_variant", i32, ()),
        ("layout", None, (i32, i64, p)),
        ("update", ctypes.c_int, (i32, p, p, p)),
        ("sum_squares", ctypes.c_int, (i32, i32, p, i64, i32, p, p)),
        ("expand", ctypes.c_int, (i32, i32, i64, p, p, p)),
        ("compress", ctypes.c_int, (i32, i32, i64, p, p, p)),
        ("digest", ctypes.c_int, (p, i64, i64, p)),
        ("pool_new", p, (i32, i32, p, i64, p)),
        ("pool_submit", u64, (p, i64, p, p, i64, p, i32, i32, p)),
        ("pool_wait", u64, (p, u64, f64)),
        ("pool_reap", i64, (p, p, i64)),
        ("pool_next_chunk", i32, (p, f64, p)),
        ("pool_stop", i32, (p, f64)),
        ("pool_delete", None, (p,)),
    ):
        function = getattr(library, f"outcore_optim_{name}")
        function.restype, function.argtypes = returns, arguments
    return library


class ExtensionBackend:
    """The kernels of one instruction set: by default the widest that this processor has."""

    def __init__(
        self, variant: Literal["auto", "baseline", "avx2", "avx512"] = "auto", library_path: Path | None = None
    ) -> None:
        """`library_path`: a built library (default: `build_extension()`). ExtensionUnavailable, or ValueError when the
        processor lacks the variant."""
        self.library = load_library(library_path or build_extension())
        best = int(self.library.outcore_optim_best_variant())
        self.available_variants = VARIANT_NAMES[: best + 1]
        self.variant = self.available_variants[-1] if variant == "auto" else variant
        if self.variant not in self.available_variants:
            raise ValueError(
                f"this processor has no {variant}; it can run {', '.join(self.available_variants)}: take 'auto'"
            )
        self.variant_code = VARIANT_NAMES.index(self.variant)
        self.name = f"extension ({self.variant})"

    def update(self, state_format: StateFormat, job: ChunkJob, hyper: AdamWHyper) -> None:
        hyper.check_moments(state_format.moments8)
        batch = JobBatch(state_format, [job])
        types, c_hyper = c_types(batch), c_scalars(hyper)
        raise_errno(
            self.library.outcore_optim_update(
                self.variant_code, ctypes.byref(types), ctypes.byref(batch.array), ctypes.byref(c_hyper)
            )
        )

    def grad_sumsq_and_finite(self, grad: torch.Tensor, num_threads: int = 1) -> GradStats:
        check_grad(grad)
        total, all_finite = ctypes.c_double(), ctypes.c_int32()
        raise_errno(
            self.library.outcore_optim_sum_squares(
                self.variant_code,
                DTYPE_CODES[grad.dtype],
                grad.data_ptr(),
                grad.numel(),
                num_threads,
                ctypes.byref(total),
                ctypes.byref(all_finite),
            )
        )
        return GradStats(total.value, bool(all_finite.value))

    def expand(
        self,
        state_format: StateFormat,
        state: torch.Tensor,
        exp_avg: torch.Tensor | None = None,
        exp_avg_sq: torch.Tensor | None = None,
    ) -> None:
        numel = check_moments(state_format, state, exp_avg, exp_avg_sq)
        tail_of(state_format, state, numel)
        raise_errno(
            self.library.outcore_optim_expand(
                self.variant_code,
                state_format.code,
                numel,
                state.data_ptr(),
                None if exp_avg is None else exp_avg.data_ptr(),
                None if exp_avg_sq is None else exp_avg_sq.data_ptr(),
            )
        )

    def compress(
        self, state_format: StateFormat, state: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
    ) -> None:
        numel = check_moments(state_format, state, exp_avg, exp_avg_sq)
        check_unsigned(exp_avg_sq)
        tail_of(state_format, state, numel)
        raise_errno(
            self.library.outcore_optim_compress(
                self.variant_code, state_format.code, numel, state.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr()
            )
        )

    @property
    def has_digest(self) -> bool:
        """Whether this processor computes CRC-32C."""
        return self.library.outcore_optim_digest(None, 0, 1, None) == 0

    def digest(self, data: np.ndarray, block_bytes: int) -> np.ndarray:
        """One 64-bit digest for each `block_bytes` of contiguous uint8 `data`, the last block shorter."""
        found = np.empty(-(-data.nbytes // block_bytes), dtype=np.uint64)
        raise_errno(self.library.outcore_optim_digest(data.ctypes.data, data.nbytes, block_bytes, found.ctypes.data))
        return found

    def layout(self, state_format: StateFormat, numel: int) -> dict[str, int]:
        """Byte offsets the C++ side uses; for tests."""
        out = CLayout()
        self.library.outcore_optim_layout(state_format.code, numel, ctypes.byref(out))
        return {name: getattr(out, name) for name in LAYOUT_NAMES}

    def new_queue(self, num_threads: int, cpus: Sequence[int] | None, task_numel: int) -> ExtensionQueue:
        return ExtensionQueue(self, num_threads, cpus, task_numel)


class ExtensionQueue:
    """pool.cpp's Pool. `delete` only when no thread is inside a call."""

    def __init__(
        self, backend: ExtensionBackend, num_threads: int, cpus: Sequence[int] | None, task_numel: int
    ) -> None:
        self._library = backend.library
        code = ctypes.c_int()
        cpu_array = None if cpus is None else (ctypes.c_int32 * num_threads)(*cpus)
        self._pool = self._library.outcore_optim_pool_new(
            backend.variant_code, num_threads, cpu_array, task_numel, ctypes.byref(code)
        )
        if not self._pool:
            raise RuntimeError(
                f"cannot start {num_threads} optimizer threads: {os.strerror(code.value)}; take fewer threads, or "
                "check `ulimit -u` and the CPUs given"
            )

    def submit(self, priority: int, batch: JobBatch, hyper: AdamWHyper | None, work: Work, notify_chunks: bool) -> int:
        types, code = c_types(batch), ctypes.c_int()
        c_hyper = CHyper() if hyper is None else c_scalars(hyper)
        ticket_id = self._library.outcore_optim_pool_submit(
            self._pool,
            priority,
            ctypes.byref(types),
            ctypes.byref(batch.array),
            len(batch),
            ctypes.byref(c_hyper),
            WORK_CODES[work],
            int(notify_chunks),
            ctypes.byref(code),
        )
        raise_errno(code.value)
        return ticket_id

    def wait_finished(self, seen: int, timeout_s: float) -> int:
        return self._library.outcore_optim_pool_wait(self._pool, seen, timeout_s)

    def reap(self) -> list[FinishedUnit]:
        found: list[FinishedUnit] = []
        out = (CFinished * REAP_CAPACITY)()
        while True:
            count = self._library.outcore_optim_pool_reap(self._pool, ctypes.byref(out), REAP_CAPACITY)
            for item in out[:count]:
                scanned = not (item.all_finite and math.isnan(item.sum_squares))
                found.append(
                    FinishedUnit(
                        ticket_id=item.ticket,
                        status=STATUSES[item.status],
                        stats=GradStats(item.sum_squares, bool(item.all_finite)) if scanned else None,
                        started_s=item.started_s,
                        finished_s=item.finished_s,
                        busy_s=item.busy_s,
                    )
                )
            if count < REAP_CAPACITY:
                return found

    def next_chunk(self, timeout_s: float) -> FinishedChunk | None:
        out = CChunkDone()
        if not self._library.outcore_optim_pool_next_chunk(self._pool, timeout_s, ctypes.byref(out)):
            return None
        return FinishedChunk(out.ticket, out.chunk, STATUSES[out.status], out.finished_s)

    def stop(self, timeout_s: float) -> bool:
        return bool(self._library.outcore_optim_pool_stop(self._pool, timeout_s))

    def delete(self) -> None:
        self._library.outcore_optim_pool_delete(self._pool)


def c_types(batch: JobBatch) -> CTypes:
    """Format and types of a batch, as the C++ side reads them."""
    code = 0 if batch.state_format is None else batch.state_format.code
    return CTypes(code, DTYPE_CODES[batch.grad_dtype], DTYPE_CODES[batch.param_dtype], 0)


def c_scalars(hyper: AdamWHyper) -> CHyper:
    """The hyper-parameters as the C++ side reads them."""
    scalars = hyper.scalars()
    out = CHyper(seed=hyper.seed, step=hyper.step)
    for name, value in scalars._asdict().items():
        setattr(out, name, int(value) if name == "lerp_from_grad" else value)
    return out


def raise_errno(code: int) -> None:
    """RuntimeError (MemoryError for ENOMEM) for a failed call."""
    if code == 0:
        return
    reason = os.strerror(code)
    if code == 12:
        raise MemoryError(f"the CPU optimizer had no memory for its queue: {reason}")
    raise RuntimeError(f"the CPU optimizer refused: {reason}")


assert ctypes.sizeof(CJob) == 64 and ctypes.sizeof(CHyper) == 56
