"""The exact split of an fp32 master into its bf16 parameter and a 16-bit residual, and one with 8 bits that is not.

    residual  = low 16 bits of the master
    parameter = (bits of the master + 0x8000) >> 16        (mod 2^16)
    master    = parameter * 2^16 + residual as a signed number (mod 2^32)

The carry into the parameter is the residual's top bit, so every one of the 2^32 bit patterns is recovered exactly:
denormals, infinities and NaN included. The parameter is the master rounded to nearest with ties away from zero (half
up in the bit pattern). Ties to even, which a plain cast takes, would be ambiguous: the residual 0x8000 could belong to
the parameter below or above it. The two differ only for masters exactly halfway between two bf16 numbers. Formats with
an fp32 master round their bf16 parameters in the same way, so a run is the same in `fp32` and in `split`.

A NaN in the range 0x7f800001-0x7f807fff or 0x7fff8000-0x7fffffff (or their negatives) would show as infinity or zero in
the parameter; the kernels therefore only ever store the quiet NaN 0x7fc00000, whose parameter is a NaN.

With a residual of 8 bits the master is an fp32 number whose lowest 8 bits are zero: 15 bits after the point where bf16
has 7 and fp32 23. The residual is the upper half of the one above, and parameter and master follow from it in the same
way. Small updates would be lost to rounding to nearest, so a new master is rounded up or down at random, unbiased.
"""

from __future__ import annotations

import torch


def join_master(param: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """(bf16 [n], int16 or int8 [n]) -> fp32 [n], the exact master."""
    high = param.view(torch.int16).to(torch.int64) << 16
    low = residual.to(torch.int64) << (0 if residual.dtype == torch.int16 else 8)
    return (high + low).to(torch.int32).view(torch.float32)


def split_master(master: torch.Tensor, residual_dtype: torch.dtype = torch.int16) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [n] -> (bf16 parameter [n], residual [n]); for int8 the master must have been rounded to 24 bits."""
    bits = master.contiguous().view(torch.int32)
    residual = bits.to(torch.int16) if residual_dtype == torch.int16 else (bits >> 8).to(torch.int8)
    param = ((bits.to(torch.int64) + 0x8000) >> 16).to(torch.int16)
    return param.view(torch.bfloat16), residual


def round_to_24_bits(master: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 [n] with the lowest 8 bits zero: rounded by `random` (whole numbers in [0, 256), [n]), or to nearest.

    Rounding is of the magnitude; halves go away from zero. To nearest the bf16 parameter stays that of `master`: where
    the next number above has another one, the one below is taken. A NaN becomes the quiet one.
    """
    bits = torch.where(master.isnan(), float("nan"), master).view(torch.int32)
    if random is None:
        low = bits & 0xFFFF
        add = torch.where((low >= 0x7F80) & (low < 0x8000), 0, 0x80).to(torch.int32)
    else:
        add = random.to(torch.int32)
    return ((bits + add) & ~0xFF).view(torch.float32)


def cast_param(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 [n] rounded to a parameter type: fp16 to nearest, ties to even; bf16 as `split_master` does.

    The only NaN in it may be the canonical one.
    """
    if dtype == torch.bfloat16:
        return split_master(master)[0]
    return one_nan(master).to(dtype)


def one_nan(x: torch.Tensor) -> torch.Tensor:
    """Values with every NaN the canonical one."""
    return torch.where(x.isnan(), float("nan"), x)
