"""Matrices rounded to 8 bits, and their products on the tensor cores: the two recipes of torchao.float8.

A matrix is multiplied by a factor and rounded, and its products are divided by that again. The factor is the format's
largest value over the matrix's: one for all of it (`float8_tensorwise`; gradients of the output in e5m2, the rest in
e4m3) or one for each row, rounded down to a power of two (`float8_rowwise`; all in e4m3). Rounding is one operation,
which the compiler does not look into: on a GPU two kernels (`float8_kernel`), elsewhere what they compute, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

FLOAT8 = ("float8_tensorwise", "float8_rowwise")
MULTIPLE = 16
"""The tensor cores want both sides of a matrix in 8 bits to be multiples of this."""
LEAST_AMAX = 1e-12
"""Stands for the largest value of a matrix of zeros, as in torchao."""
TILE = (64, 128, 4)
"""Rows, columns and warps of one program of the kernels."""
MOST_COLUMNS = 32768
"""Rows up to this long are read once, by a program that holds them whole."""


def _rounded(rows: torch.Tensor, recipe: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """rows [n, k] -> [in 8 bits [n, k]; what each row is to be multiplied by again, [n, 1], or all by, []]."""
    by_row = recipe == "float8_rowwise"
    amax = rows.abs().amax(1, keepdim=True) if by_row else rows.abs().amax()
    factor = (torch.finfo(dtype).max / amax.double().clamp(min=LEAST_AMAX)).float()
    if by_row:
        factor = torch.exp2(torch.floor(torch.log2(factor)))
    return [(rows.float() * factor).to(dtype).contiguous(), factor.reciprocal()]


@torch.library.custom_op("outcore::float8_rounded", mutates_args=())
def float8_rounded(matrix: torch.Tensor, recipe: str, of_gradient: bool, both: bool) -> list[torch.Tensor]:
    """matrix [n, k], bf16 -> [it in 8 bits; what its rows [n, 1] or all of it [] are to be multiplied by again, fp32].

    `both`: behind these, the same of the transposed matrix, whose rows are filled up with zeros to whole `MULTIPLE`s.
    `of_gradient`: the matrix is one."""
    n, dtype = len(matrix), _type_of(recipe, of_gradient)
    places = _places(matrix, recipe, dtype, both)
    if not matrix.numel():  # an expert that no token chose
        return places
    if matrix.device.type == "cuda":
        round_by_kernels(matrix.contiguous(), recipe, places)
        return places
    found = _rounded(matrix, recipe, dtype)
    if both:
        turned, scale = _rounded(matrix.t(), recipe, dtype)
        found += [pad(turned.view(torch.uint8), (0, -n % MULTIPLE)).view(dtype), scale]
    return found


@float8_rounded.register_fake
def _(matrix: torch.Tensor, recipe: str, of_gradient: bool, both: bool) -> list[torch.Tensor]:
    return _places(matrix, recipe, _type_of(recipe, of_gradient), both)


def _type_of(recipe: str, of_gradient: bool) -> torch.dtype:
    return torch.float8_e5m2 if of_gradient and recipe == "float8_tensorwise" else torch.float8_e4m3fn


def _places(matrix: torch.Tensor, recipe: str, dtype: torch.dtype, both: bool) -> list[torch.Tensor]:
    n, k = matrix.shape
    found = []
    for rows, columns in ((n, k), (k, n + -n % MULTIPLE))[: 1 + both]:
        found.append(matrix.new_empty((rows, columns), dtype=dtype))
        found.append(matrix.new_empty((rows, 1) if recipe == "float8_rowwise" else (), dtype=torch.float32))
    return found


def round_by_kernels(matrix: torch.Tensor, recipe: str, places: Sequence[torch.Tensor]) -> None:
    """Write what `float8_rounded` gives of a contiguous matrix to `places`, by Triton's kernels."""
    from outcore.model.forward import float8_kernel

    kernels: Any = float8_kernel
    (n, k), by_row, both = matrix.shape, recipe == "float8_rowwise", len(places) == 4
    out, scale, turned, turned_scale = places if both else (*places, *places)
    bits, limits = matrix.view(torch.int16), {"MOST": torch.finfo(out.dtype).max, "LEAST": LEAST_AMAX}
    if by_row and not both and k <= MOST_COLUMNS:
        whole = 1 << (k - 1).bit_length()
        rows, warps = max(1, 8192 // whole), max(4, whole // 2048)
        grid = (-(-n // rows),)
        kernels.rounded_rows[grid](bits, out.view(torch.uint8), scale, n, k, **limits, N=rows, K=whole, num_warps=warps)
        return
    rows, columns, warps = TILE
    tops = torch.zeros(n + k if by_row else 1, dtype=torch.int32, device=matrix.device)
    given, grid = (bits, tops, tops[n:]), (-(-n // rows), -(-k // columns))
    shape = {"BY_ROW": by_row, "BOTH": both, "N": rows, "K": columns, "num_warps": warps}
    kernels.largest[grid](*given, n, k, **shape)
    kernels.rounded[grid](
        *given,
        out.view(torch.uint8),
        scale,
        turned.view(torch.uint8),
        turned_scale,
        n,
        k,
        turned.shape[1],
        WIDE=out.dtype is torch.float8_e5m2,
        **limits,
        **shape,
    )


def float8_product(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], *, fast_sums: bool) -> torch.Tensor:
    """left [n, k], right [m, k], each with its scales -> left right' [n, m] in bf16."""
    (a, scale_a), (b, scale_b) = left, right
    if not a.numel():
        return scale_a.new_zeros((len(a), len(b)), dtype=torch.bfloat16)
    return torch.ops.aten._scaled_mm(  # what torchao calls; torch has no public name for it
        a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=torch.bfloat16, use_fast_accum=fast_sums
    )
