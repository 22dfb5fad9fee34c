"""Work that one call hands to the optimizer: the chunks of a unit, checked once, as the array the C++ side reads.

A `JobBatch` may be submitted many times; `with_grads` gives one with other gradients (a ring of gradient slots) without
checking the states again. The batch keeps its tensors alive; a pool keeps the batch until its unit has finished."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from outcore.optim.formats import BLOCK_NUMEL, StateFormat, tail_of
from outcore.optim.formats.state_format import GRAD_DTYPES, check_buffer

DTYPE_CODES: dict[torch.dtype | None, int] = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""Codes as in abi.h."""
NEVER = 2**63 - 1
"""End of the ranges without weight decay, beyond every chunk."""


class CJob(ctypes.Structure):
    """abi.h: Job."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("element_offset", ctypes.c_int64),
        ("undecayed", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class ChunkJob:
    """One chunk of n parameters: where its gradient, states and parameter are. All on the CPU and contiguous."""

    grad: torch.Tensor
    """bf16, fp16 or fp32, n elements."""
    state: torch.Tensor
    """uint8, [>= chunk_bytes(n)], updated in place."""
    param: torch.Tensor | None = None
    """bf16, fp16 or fp32, n elements, written (split formats: bf16, read too); None: no copy (fp32 master formats)."""
    element_offset: int = 0
    """Index of the first parameter in the model, a multiple of 256: the key of stochastic rounding."""
    undecayed: tuple[tuple[int, int], ...] = ()
    """[start, stop) of what has no weight decay (norms and biases), in order, in whole blocks of 256 but at the end."""
    next: torch.Tensor | None = None
    """Like `state`: where the updated states go instead, and `state` stays as it was. None: in place."""
    kept: torch.Tensor | None = None
    """Like `param`: where it is kept as it was before the update. None: nowhere."""


def by_decay(job: ChunkJob) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, whether it has weight decay) of the chunk's stretches, in order."""
    at = 0
    for start, stop in (*job.undecayed, (job.grad.numel(), job.grad.numel())):
        if start > at:
            yield at, start, True
        if stop > start:
            yield start, stop, False
        at = stop


class JobBatch:
    """The chunks of one unit, all of one format, gradient type and parameter type. ValueError when something is off."""

    sources: tuple[torch.Tensor, ...] = ()
    """Gradients that are added up into the only one (`of_sum`)."""
    addresses: ctypes.Array[ctypes.c_void_p]

    def __init__(self, state_format: StateFormat, jobs: Sequence[ChunkJob]) -> None:
        if not jobs:
            raise ValueError("a unit needs at least one chunk")
        first = jobs[0]
        self._ranges: list[ctypes.Array[ctypes.c_int64]] = []
        self.state_format: StateFormat | None = state_format
        self.grad_dtype = first.grad.dtype
        self.param_dtype = None if first.param is None else first.param.dtype
        state_format.check_param_dtype(self.param_dtype)
        self.array = (CJob * len(jobs))()
        for index, job in enumerate(jobs):
            try:
                self._check(job)
            except ValueError as error:
                raise ValueError(f"chunk {index} of {len(jobs)}: {error}") from None
            self.array[index] = CJob(
                job.state.data_ptr(),
                _address(job.param),
                job.grad.data_ptr(),
                job.grad.numel(),
                job.element_offset,
                self._address_of_ranges(job.undecayed),
                _address(job.next),
                _address(job.kept),
            )
        self.jobs: tuple[ChunkJob, ...] = tuple(jobs)
        self.grads: tuple[torch.Tensor, ...] = tuple(job.grad for job in jobs)

    def __len__(self) -> int:
        return len(self.array)

    @property
    def numel(self) -> int:
        return sum(grad.numel() for grad in self.grads)

    @classmethod
    def of_grads(cls, grads: Sequence[torch.Tensor]) -> JobBatch:
        """Gradients without states, for their sum of squares."""
        if not grads:
            raise ValueError("a sum of squares needs at least one gradient")
        batch = cls.__new__(cls)
        batch.state_format = batch.param_dtype = None
        batch.grad_dtype = grads[0].dtype
        batch.jobs = ()
        batch.grads = tuple(grads)
        batch.array = (CJob * len(grads))()
        for index, grad in enumerate(grads):
            check_grad(grad)
            if grad.dtype != batch.grad_dtype:
                raise ValueError(
                    f"gradient {index} is {grad.dtype}, the first one {batch.grad_dtype}: one type per unit"
                )
            batch.array[index] = CJob(0, 0, grad.data_ptr(), grad.numel(), 0, 0, 0, 0)
        return batch

    @classmethod
    def of_sum(cls, sources: Sequence[torch.Tensor], into: torch.Tensor) -> JobBatch:
        """Gradients of one size to be added up `into` memory of theirs."""
        batch = cls.of_grads([into])
        for source in sources:
            check_grad(source)
            if source.dtype != into.dtype or source.numel() != into.numel():
                raise ValueError(
                    f"{source.numel()} x {source.dtype} cannot be added up into {into.numel()} x {into.dtype}"
                )
        batch.sources = tuple(sources)
        batch.addresses = (ctypes.c_void_p * len(sources))(*(source.data_ptr() for source in sources))
        batch.array[0] = CJob(
            into.data_ptr(), ctypes.addressof(batch.addresses), into.data_ptr(), into.numel(), len(sources), 0, 0, 0
        )
        return batch

    def with_grads(self, grads: Sequence[torch.Tensor]) -> JobBatch:
        """Copy with the same chunks with other gradients of the same sizes; their type may differ from before."""
        if len(grads) != len(self):
            raise ValueError(f"this unit has {len(self)} chunks, got {len(grads)} gradients")
        batch = JobBatch.__new__(JobBatch)
        batch.state_format, batch.param_dtype, batch.grad_dtype = self.state_format, self.param_dtype, grads[0].dtype
        batch.array, batch._ranges = type(self.array).from_buffer_copy(self.array), self._ranges
        for index, (grad, before) in enumerate(zip(grads, self.grads)):
            check_grad(grad)
            if grad.numel() != before.numel() or grad.dtype != batch.grad_dtype:
                raise ValueError(
                    f"gradient {index} has {grad.numel()} elements of {grad.dtype}; this chunk has {before.numel()} "
                    f"parameters and the first gradient is {batch.grad_dtype}"
                )
            batch.array[index].grad = grad.data_ptr()
        batch.grads = tuple(grads)
        batch.jobs = tuple(replace(job, grad=grad) for grad, job in zip(grads, self.jobs))
        return batch

    def ahead(self, states: Sequence[torch.Tensor], params: torch.Tensor) -> JobBatch:
        """Copy of this batch whose update can be taken back. New states go to `states`, one buffer for each chunk and
        as large as it; old parameters go to `params`, which has room for those of all chunks."""
        assert self.state_format is not None
        kept = params.split([grad.numel() for grad in self.grads])
        jobs = [replace(job, next=to, kept=old) for job, to, old in zip(self.jobs, states, kept, strict=True)]
        return JobBatch(self.state_format, jobs)

    def _address_of_ranges(self, undecayed: tuple[tuple[int, int], ...]) -> int | None:
        """Address of the ranges for C++, with an end that no element reaches; None where everything decays."""
        if not undecayed:
            return None
        flat = [*(at for both in undecayed for at in both), NEVER, NEVER]
        self._ranges.append((ctypes.c_int64 * len(flat))(*flat))
        return ctypes.addressof(self._ranges[-1])

    def _check(self, job: ChunkJob) -> None:
        assert self.state_format is not None
        check_grad(job.grad)
        if job.grad.dtype != self.grad_dtype:
            raise ValueError(f"its gradient is {job.grad.dtype}, that of the first chunk {self.grad_dtype}")
        dtype = None if job.param is None else job.param.dtype
        if dtype != self.param_dtype:
            raise ValueError(f"its parameter is {dtype}, that of the first chunk {self.param_dtype}")
        if job.param is not None:
            _check_dense(job.param, "parameter")
            if job.param.numel() != job.grad.numel():
                raise ValueError(f"{job.param.numel()} parameters but {job.grad.numel()} gradients")
        check_buffer(job.state, self.state_format.chunk_bytes(job.grad.numel()))
        if job.next is not None:
            if self.state_format.compressed:
                raise ValueError(f"states of {self.state_format.name} are updated in place: their tail moves")
            check_buffer(job.next, self.state_format.chunk_bytes(job.grad.numel()))
        if job.kept is not None and (job.param is None or job.kept.shape != job.param.shape or job.kept.dtype != dtype):
            raise ValueError(f"parameters of type {dtype} are kept in as many of that type")
        if self.state_format.compressed:
            tail_of(self.state_format, job.state, job.grad.numel())
        for start, stop in job.undecayed:
            if start % BLOCK_NUMEL or (stop % BLOCK_NUMEL and stop != job.grad.numel()) or start >= stop:
                raise ValueError(f"[{start}, {stop}) without weight decay is not in whole blocks of {BLOCK_NUMEL}")
        if job.element_offset < 0 or job.element_offset % BLOCK_NUMEL:
            raise ValueError(
                f"element_offset must be a multiple of {BLOCK_NUMEL} from 0 on, so that blocks do not depend on how "
                f"the model is cut into chunks; got {job.element_offset}"
            )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def check_grad(grad: torch.Tensor) -> None:
    """ValueError unless `grad` is one the kernels read."""
    _check_dense(grad, "gradient")
    if grad.dtype not in GRAD_DTYPES:
        raise ValueError(f"gradients must be bf16, fp16 or fp32, not {grad.dtype}")


def _check_dense(tensor: torch.Tensor, what: str) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        raise ValueError(
            f"a {what} must be a contiguous tensor on the CPU with at least one element, got {list(tensor.shape)} on "
            f"{tensor.device}, contiguous: {tensor.is_contiguous()}"
        )
