"""AdamW on one chunk of plain states on a GPU, in Triton: the bits of the CPU's kernels (`hyper.py` has the formula).

Each operation is rounded once: no product is fused with a sum, and division and root are the correctly rounded ones, in
PTX of their own, because the library's flush denormals. Values are stored as bit patterns, so a NaN is the canonical
one. Imported on a GPU only."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 1024
NO_PARAM, FP32_PARAM, BF16_PARAM, FP16_PARAM = 0, 1, 2, 3


@triton.jit
def _without_tiny(x):
    """Bits of a moment: zero below 2^-126, the quiet NaN for each NaN."""
    bits = tl.where(tl.abs(x) < 1.1754943508222875e-38, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FC00000, bits)


@triton.jit
def _divided(x, y):
    return tl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)


@triton.jit
def _root(x):
    return tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def adamw(
    usable,
    grad,
    first,
    exp_avg,
    exp_avg_sq,
    param,
    numel,
    grad_scale,
    lerp_coefficient,
    beta2,
    one_minus_beta2,
    bias_correction2_sqrt,
    eps,
    negative_step_size,
    decay,
    LERP_FROM_GRAD: tl.constexpr,
    SPLIT: tl.constexpr,
    PARAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of elements. `usable` 0: nothing changes. `first`: residuals (SPLIT) or masters; moments and fp32
    masters come as int32, residuals and 16-bit parameters as int16."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < numel) & (tl.load(usable) != 0)
    g = tl.load(grad + at, inside, 0.0).to(tl.float32) * grad_scale
    m = tl.load(exp_avg + at, inside, 0).to(tl.float32, bitcast=True)
    v = tl.load(exp_avg_sq + at, inside, 0).to(tl.float32, bitcast=True)
    if SPLIT:
        high = tl.load(param + at, inside, 0).to(tl.int32) << 16
        w = (high + tl.load(first + at, inside, 0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        w = tl.load(first + at, inside, 0).to(tl.float32, bitcast=True)
    base = g if LERP_FROM_GRAD else m
    m_bits = _without_tiny(base + (g - m) * lerp_coefficient)
    v_bits = _without_tiny(v * beta2 + (g * one_minus_beta2) * g)
    m = m_bits.to(tl.float32, bitcast=True)
    denominator = _divided(_root(v_bits.to(tl.float32, bitcast=True)), bias_correction2_sqrt) + eps
    w = w * decay + _divided(m * negative_step_size, denominator)
    bits = tl.where(w != w, 0x7FC00000, w.to(tl.int32, bitcast=True))
    tl.store(exp_avg + at, m_bits, inside)
    tl.store(exp_avg_sq + at, v_bits, inside)
    if SPLIT:
        tl.store(first + at, bits.to(tl.int16), inside)
    else:
        tl.store(first + at, bits, inside)
    if PARAM == 2:
        tl.store(param + at, ((bits + 0x8000) >> 16).to(tl.int16), inside)  # halves go away from zero
    elif PARAM == 3:
        half = w.to(tl.float16).to(tl.int16, bitcast=True)
        tl.store(param + at, tl.where(w != w, 0x7E00, half).to(tl.int16), inside)
    elif PARAM == 1:
        tl.store(param + at, bits, inside)
