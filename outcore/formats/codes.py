"""NF4 in bitsandbytes' layout, and int8: one fp32 scale for each run of values, by absolute maximum.

NF4 (QLoRA, Dettmers et al. 2023): 16 code values, quantiles of a normal distribution, in blocks of 64; two codes in a
byte, the first in the high half. Values are code * absmax in fp32, rounded once to the type of the weights, and codes
are chosen by the same thresholds as bitsandbytes', so that packed bytes and gradients equal those of a resident model.
"""

from __future__ import annotations

from functools import cache

import torch

from outcore.formats.kernel_layout import CHUNK_BYTES, KernelLayout
from outcore.formats.packed import PackedFormat, Plane

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Table of bitsandbytes' NF4 (functional.py), also in the appendix of the QLoRA paper."""
NF4_BLOCK = 64
INT8_BLOCK = 128
INT8_MAX = 127
LEAST_SCALE = 1e-38
"""Below any absmax that matters: a block of zeros is divided by this."""


@cache
def _nf4_table(device: torch.device) -> torch.Tensor:
    return torch.tensor(NF4_VALUES, dtype=torch.float32, device=device)


@cache
def _nf4_thresholds() -> torch.Tensor:
    """Midpoints of neighbouring codes."""
    table = _nf4_table(torch.device("cpu"))
    return (table[:-1] + table[1:]) / 2


class Nf4(PackedFormat):
    """4 bits and an fp32 scale for 64 values: 4.5 bits."""

    name, block = "nf4", NF4_BLOCK
    planes = (Plane("codes", torch.uint8, NF4_BLOCK // 2), Plane("absmax", torch.float32, 1))
    layout = KernelLayout("nf4", -1)

    def table(self, device: torch.device) -> torch.Tensor:
        return _nf4_table(device)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        codes, absmax = planes
        both = torch.stack((codes >> 4, codes & 0xF), dim=-1).flatten(1)
        return _nf4_table(codes.device)[both.int()] * absmax

    def pack_blocks(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        absmax = values.abs().amax(dim=1, keepdim=True)
        scaled = (values * (1.0 / absmax.clamp(min=LEAST_SCALE))).clamp_(-1, 1)
        codes = torch.bucketize(scaled, _nf4_thresholds()).to(torch.uint8)
        return (codes[:, ::2] << 4) | codes[:, 1::2], absmax


class Int8(PackedFormat):
    """8 bits and an fp32 scale for `block` values, by default 128: 8.25 bits."""

    def __init__(self, block: int = INT8_BLOCK) -> None:
        self.name, self.block = "int8" if block == INT8_BLOCK else f"int8_{block}", block
        self.planes = (Plane("codes", torch.int8, block), Plane("scale", torch.float32, 1))
        self.layout = None if block % CHUNK_BYTES else KernelLayout("int8", 0)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        codes, scale = planes
        return codes.float() * scale

    def pack_blocks(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = values.abs().amax(dim=1, keepdim=True) / INT8_MAX
        codes = (values / scale.clamp(min=LEAST_SCALE)).round_().clamp_(-INT8_MAX, INT8_MAX)
        return codes.to(torch.int8), scale
