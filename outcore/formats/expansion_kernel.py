"""Packed weights expanded on a GPU, in Triton: every byte is read once, every value written once, with the reference's
bits. Imported on a GPU only."""

from __future__ import annotations

import triton
import triton.language as tl

from outcore.formats.product_kernel import codes_of, scales_of


@triton.jit
def _values(code, factor, offset, FORMAT: tl.constexpr, HAS_OFFSET: tl.constexpr):
    """fp32 of codes [1, chunks, 16] with the scale and offset of their chunks [1, chunks]."""
    if FORMAT == "int4":  # a scale in fp32 makes scale * code inexact, so the reference subtracts first
        return (code - offset[:, :, None]) * factor[:, :, None]
    found = code * factor[:, :, None]
    if HAS_OFFSET:
        found -= offset[:, :, None]
    return found


@triton.jit(do_not_specialize=["num_chunks"])
def packed_expansion(
    codes,
    scale,
    zero,
    table,
    out,
    num_chunks,
    FORMAT: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    CODES_AT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Write the values of `num_chunks` runs of 16 bytes of codes to `out`; names as in `packed_product`."""
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    inside = (chunk < num_chunks)[None, :]
    number = (chunk // BLOCK_CHUNKS)[None, :]
    t = (chunk % BLOCK_CHUNKS).to(tl.int32)
    block = codes + number * BLOCK_BYTES
    place = tl.arange(0, 16)[None, None, :]
    at = block[:, :, None] + (CODES_AT + t * 16)[None, :, None] + place
    low, high = codes_of(at, inside[:, :, None], FORMAT, block, t, table)
    if FORMAT == "int4":
        factor = tl.load(scale + number, inside, 0).to(tl.float32)
        offset = tl.load(zero + number, inside, 0).to(tl.float32) if HAS_ZERO else factor * 0.0 + 8.0
        high_factor, high_offset = factor, offset
    elif FORMAT == "mxfp4":  # the exponent's bits are those of an fp32 number, but for the least, a subnormal one there
        exponent = tl.load(scale + number, inside, 0).to(tl.int32)
        factor = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
        low, high = low * 16384.0, high * 16384.0
        offset, high_factor, high_offset = factor, factor, factor
    else:
        factor, offset, high_factor, high_offset = scales_of(
            block, number, t, scale, zero, inside, FORMAT, BLOCK_BYTES, HAS_ZERO
        )
    kind = out.dtype.element_ty
    low = _values(low, factor, offset, FORMAT, HAS_OFFSET).to(kind)
    if ORDER == 0:
        tl.store(out + (chunk * 16)[None, :, None] + place, low, inside[:, :, None])
    else:
        high = _values(high, high_factor, high_offset, FORMAT, HAS_OFFSET).to(kind)
        if ORDER == -1:
            both = tl.join(low, high).reshape(1, CHUNKS, 32)
            tl.store(out + (chunk * 32)[None, :, None] + tl.arange(0, 32)[None, None, :], both, inside[:, :, None])
        else:
            start = (chunk // ORDER * (32 * ORDER) + chunk % ORDER * 16)[None, :, None] + place
            tl.store(out + start, low, inside[:, :, None])
            tl.store(out + start + 16 * ORDER, high, inside[:, :, None])
