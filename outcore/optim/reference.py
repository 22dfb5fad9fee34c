"""The optimizer in torch: the same bits as the C++ extension, slower. Used where there is no compiler, and to test it.

Only element-wise torch operations that round once are used (multiply, add, subtract, divide, compare); not `lerp` and
`addcmul`, which fuse where the processor can, and not fp32 `sqrt`, which is off by an ulp for one number in six with
the vector library of torch's x86 wheels (M, 2.13). Cost: about 40 passes over a slice of 2^18 elements, which stays in
the cache.

It needs denormals: a process that flushes them (torch.set_flush_denormal(True)) gets other bits; the extension does
not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from outcore.optim.formats import BLOCK_NUMEL, StateFormat
from outcore.optim.formats.chunk_state import cast_param, join_master, one_nan, round_to_24_bits, split_master
from outcore.optim.formats.compressed import compress_moments, expand_moments
from outcore.optim.formats.moments8 import (
    SMALLEST_EXP_AVG,
    SMALLEST_EXP_AVG_SQ,
    Codes,
    exact_sqrt,
    pack_stochastic,
    random_bytes,
    unpack,
)
from outcore.optim.hyper import AdamWHyper, AdamWScalars
from outcore.optim.jobs import ChunkJob, by_decay

SLICE_NUMEL = 1 << 18
SUM_BLOCK_NUMEL = 4096
SUM_LANES = 64
SMALLEST_NORMAL = 2.0**-126
LARGEST_GRAD = 2.0**60
"""Scaled gradients above it are refused like infinity: their square would overflow the second moment."""


def update_chunk(state_format: StateFormat, job: ChunkJob, hyper: AdamWHyper) -> None:
    """AdamW on one chunk; the arguments are those of a checked `JobBatch`."""
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
