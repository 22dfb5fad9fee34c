"""Updates on the device: AdamW on chunks that lie there, with the bits of the CPU's kernels, and Muon on matrices whose
gradient, states and parameter wait in RAM.

Muon is torch's own (`torch.optim.Muon`), a matrix at a time in fp32 with its Newton-Schulz products in bf16, and its
`match_rms_adamw`: with that a learning rate of AdamW's fits both."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from outcore.optim.formats import StateFormat
from outcore.optim.formats.chunk_state import cast_param, join_master, split_master
from outcore.optim.hyper import AdamWHyper
from outcore.optim.jobs import ChunkJob
from outcore.optim.reference import update_chunk


def updates_on_device(state_format: StateFormat) -> bool:
    """Whether `update_on_device` knows the format: those with fp32 moments."""
    return not (state_format.moments8 or state_format.compressed)


def update_on_device(state_format: StateFormat, job: ChunkJob, hyper: AdamWHyper, usable: torch.Tensor) -> None:
    """Update a chunk in place, on a GPU queued on the current stream; `job`'s tensors are on one device, the CPU's or a
    GPU's. `usable`: bool [1] there; where it is False nothing changes."""
    if job.grad.device.type == "cpu":
        if usable:
            update_chunk(state_format, job, hyper)
        return
    from outcore.optim import gpu_kernel as kernel

    numel, scalars = job.grad.numel(), hyper.scalars()
    views = {
        name: job.state[at.offset_bytes : at.offset_bytes + at.size_bytes].view(_bits(at.dtype))
        for name, at in state_format.regions(numel).items()
    }
    first = views["residual" if state_format.split_master else "master"]
    kinds = {torch.float32: kernel.FP32_PARAM, torch.bfloat16: kernel.BF16_PARAM, torch.float16: kernel.FP16_PARAM}
    launch: Any = kernel.adamw
    launch[(-(-numel // kernel.BLOCK),)](
        usable.view(torch.uint8),
        job.grad,
        first,
        views["exp_avg"],
        views["exp_avg_sq"],
        first if job.param is None else job.param.view(_bits(job.param.dtype)),
        numel,
        scalars.grad_scale,
        scalars.lerp_coefficient,
        scalars.beta2,
        scalars.one_minus_beta2,
        scalars.bias_correction2_sqrt,
        scalars.eps,
        scalars.negative_step_size,
        scalars.decay if job.weight_decay else 1.0,
        LERP_FROM_GRAD=scalars.lerp_from_grad,
        SPLIT=state_format.split_master,
        PARAM=kernel.NO_PARAM if job.param is None else kinds[job.param.dtype],
        BLOCK=kernel.BLOCK,
        enable_fp_fusion=False,
    )


def _bits(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int16


class MatrixJob(NamedTuple):
    """A matrix in RAM."""

    state_format: StateFormat
    """One `without_squares`."""
    job: ChunkJob
    """Gaps after the matrix are left alone."""
    shape: tuple[int, int]


class MatrixUpdates:
    """Muon on one matrix after another, on a thread of its own (on a GPU, on a stream of its own)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="muon")

    def submit(self, jobs: Sequence[MatrixJob], hyper: AdamWHyper) -> Future[None]:
        """Queue the update of a unit; until the result is there, the tensors belong to it."""
        return self._thread.submit(self._update, jobs, hyper)

    def _update(self, jobs: Sequence[MatrixJob], hyper: AdamWHyper) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for job in jobs:
                update_matrix(job, hyper, self._device)
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """End after the unit that is at work."""
        self._thread.shutdown(cancel_futures=True)


def update_matrix(matrix: MatrixJob, hyper: AdamWHyper, device: torch.device) -> None:
    """Muon's update in place, computed on `device`; on a GPU queued on the current stream. Of `hyper` it takes lr,
    weight_decay and grad_scale."""
    (state_format, job, shape), numel = matrix, matrix.shape[0] * matrix.shape[1]
    assert job.param is not None
    state = job.state.to(device, non_blocking=True)
    views = {
        name: state[at.offset_bytes : at.offset_bytes + at.size_bytes].view(at.dtype)[:numel]
        for name, at in state_format.regions(job.grad.numel()).items()
    }
    if state_format.split_master:
        master = join_master(job.param[:numel].to(device, non_blocking=True), views["residual"])
    else:
        master = views["master"]
    weight = torch.nn.Parameter(master.view(shape))
    grad = job.grad[:numel].to(device, non_blocking=True).to(torch.float32)
    weight.grad = (grad * hyper.grad_scale).view(shape)
    muon = torch.optim.Muon([weight], lr=hyper.lr, weight_decay=hyper.weight_decay, adjust_lr_fn="match_rms_adamw")
    muon.state[weight]["momentum_buffer"] = views["exp_avg"].view(shape)
    muon.step()
    if state_format.split_master:
        param, residual = split_master(master)
        views["residual"].copy_(residual)
    else:
        param = cast_param(master, job.param.dtype)
    job.param[:numel].copy_(param, non_blocking=True)
    if state is not job.state:
        job.state.copy_(state, non_blocking=True)
