"""Matrices in bf16 rounded to 8 bits on a GPU, in Triton: the bits of `float8.rounded`.

Both layouts that products want (as it is, and transposed) are written from one read, after another one for the largest
values; rows with scales of their own alone need a single one. Numbers come as their bits, whose order without the sign
is that of the magnitudes, a NaN above all. Imported on a GPU only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def largest(x, by_row, by_column, n, k, BY_ROW: tl.constexpr, BOTH: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Largest bits of x [n, k], int16 -> int32: of each row and, with BOTH, of each column; not BY_ROW: of all."""
    row, column = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1) * K + tl.arange(0, K)
    inside = (row < n)[:, None] & (column < k)[None, :]
    bits = tl.load(x + row.to(tl.int64)[:, None] * k + column[None, :], inside, 0).to(tl.int32) & 0x7FFF
    if BY_ROW:
        tl.atomic_max(by_row + row, tl.max(bits, 1), row < n, sem="relaxed")
        if BOTH:
            tl.atomic_max(by_column + column, tl.max(bits, 0), column < k, sem="relaxed")
    else:
        tl.atomic_max(by_row, tl.max(tl.max(bits, 1), 0), sem="relaxed")


@triton.jit
def _factor(bits, MOST: tl.constexpr, LEAST: tl.constexpr, BY_ROW: tl.constexpr):
    """Factor that brings the largest number, of these bits (bf16's), to MOST; with BY_ROW the power of two below it."""
    amax = (bits << 16).to(tl.float32, bitcast=True)
    amax = tl.where(amax < LEAST, LEAST, amax)  # a NaN stays one
    factor = tl.div_rn(tl.full(amax.shape, MOST, tl.float32), amax)
    if BY_ROW:
        power = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.where(factor == factor, power, factor)
    return factor


@triton.jit
def _scale(factor):
    return tl.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor)


@triton.jit
def _in_8_bits(x, WIDE: tl.constexpr):
    return (x.to(tl.float8e5) if WIDE else x.to(tl.float8e4nv)).to(tl.uint8, bitcast=True)


@triton.jit
def rounded(
    x,
    by_row,
    by_column,
    out,
    scale,
    turned,
    turned_scale,
    n,
    k,
    padded,
    BY_ROW: tl.constexpr,
    BOTH: tl.constexpr,
    WIDE: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """x [n, k], int16 -> out [n, k] and, with BOTH, turned [k, padded], uint8 with zeros from n on, and
    what each of their rows is to be multiplied by again. `by_row`, `by_column`: of `largest`. WIDE: e5m2, else e4m3."""
    # The other way round than `largest`: what it read last is still in the cache.
    i, j = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    row, column = i * N + tl.arange(0, N), j * K + tl.arange(0, K)
    has_row, has_column = row < n, column < k
    inside = has_row[:, None] & has_column[None, :]
    bits = tl.load(x + row.to(tl.int64)[:, None] * k + column[None, :], inside, 0).to(tl.int32)
    value = (bits << 16).to(tl.float32, bitcast=True)
    top = tl.load(by_row + row, has_row, 0) if BY_ROW else tl.load(by_row + row * 0)
    factor = _factor(top, MOST, LEAST, BY_ROW)
    tl.store(out + row.to(tl.int64)[:, None] * k + column[None, :], _in_8_bits(value * factor[:, None], WIDE), inside)
    if BY_ROW:
        tl.store(scale + row, _scale(factor), has_row & (j == 0))
    elif (i == 0) & (j == 0):
        tl.store(scale + row, _scale(factor), row == 0)
        if BOTH:
            tl.store(turned_scale + row, _scale(factor), row == 0)
    if BOTH:
        top = tl.load(by_column + column, has_column, 0) if BY_ROW else tl.load(by_row + column * 0)
        factor = _factor(top, MOST, LEAST, BY_ROW)
        found = tl.trans(_in_8_bits(tl.where(inside, value * factor[None, :], 0.0), WIDE))
        place = turned + column.to(tl.int64)[:, None] * padded + row[None, :]
        tl.store(place, found, has_column[:, None] & (row < padded)[None, :])
        if BY_ROW:
            tl.store(turned_scale + column, _scale(factor), has_column & (i == 0))


@triton.jit
def rounded_rows(x, out, scale, n, k, MOST: tl.constexpr, LEAST: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """x [n, k], int16 -> out [n, k], uint8 of e4m3, and what each row is to be multiplied by again; K at least k."""
    row, column = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, K)
    has_row = row < n
    at, inside = row.to(tl.int64)[:, None] * k + column[None, :], has_row[:, None] & (column < k)[None, :]
    bits = tl.load(x + at, inside, 0)
    factor = _factor(tl.max(bits & 0x7FFF, 1).to(tl.int32), MOST, LEAST, True)
    value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    tl.store(out + at, _in_8_bits(value * factor[:, None], False), inside)
    tl.store(scale + row, _scale(factor), has_row)
