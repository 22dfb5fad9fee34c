"""AdamW on chunks whose gradient, states and parameter lie on the device: the same bits as the CPU's kernels."""

from __future__ import annotations

from typing import Any

import torch

from outcore.optim.formats import StateFormat
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
