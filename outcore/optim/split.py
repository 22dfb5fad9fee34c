"""The exact split of an fp32 master into its bf16 parameter and a 16-bit residual.

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
"""

from __future__ import annotations

import torch


def join_master(param: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """(bf16 [n], int16 [n]) -> fp32 [n], the exact master."""
    high = param.view(torch.int16).to(torch.int32) << 16
    return (high.to(torch.int64) + residual).to(torch.int32).view(torch.float32)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [n] -> (bf16 parameter [n], int16 residual [n])."""
    bits = master.contiguous().view(torch.int32)
    residual = bits.to(torch.int16)
    param = ((bits.to(torch.int64) + 0x8000) >> 16).to(torch.int16)
    return param.view(torch.bfloat16), residual
