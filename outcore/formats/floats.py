"""Small floating-point numbers with scales: FP8 in blocks of 128 x 128 (DeepSeek, Qwen) and MXFP4 (gpt-oss).

FP8: e4m3 values and an fp32 scale ("weight_scale_inv") for each square block. A row keeps the scale of each of its
runs of columns beside them, so that any run of blocks can be expanded alone: 4 bytes for 128 values instead of for
16,384. MXFP4 (OCP microscaling 1.0): e2m1 codes, two in a byte, the first in the low half, and a power of two for 32.
"""

from __future__ import annotations

from functools import cache

import torch

from outcore.formats.kernel_layout import CHUNK_BYTES, KernelLayout
from outcore.formats.packed import PackedFormat, Plane

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the e2m1 codes 0..15."""
MXFP4_BLOCK = 32
FP32_MANTISSA_BITS = 23
SUBNORMAL_BITS = 1 << 22
"""2^-127 as an fp32 number."""


@cache
def _fp4_table(device: torch.device) -> torch.Tensor:
    return torch.tensor(FP4_VALUES, dtype=torch.float32, device=device)


class Fp8(PackedFormat):
    """e4m3 with an fp32 scale for `block` columns of a row."""

    def __init__(self, block: int = 128) -> None:
        self.name, self.block = f"fp8_{block}", block
        self.planes = (Plane("codes", torch.float8_e4m3fn, block), Plane("scale", torch.float32, 1))
        self.layout = None if block % CHUNK_BYTES else KernelLayout("fp8", 0)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        codes, scale = planes
        return codes.float() * scale


class Mxfp4(PackedFormat):
    """4 bits and an 8-bit exponent for 32 values: 4.25 bits."""

    name, block = "mxfp4", MXFP4_BLOCK
    planes = (Plane("codes", torch.uint8, MXFP4_BLOCK // 2), Plane("exponent", torch.uint8, 1))
    layout = KernelLayout("mxfp4", -1)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        codes, exponent = planes
        both = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(1)
        exponent = exponent.int()
        # The exponent's bits are those of an fp32 number, but for the least, 2^-127, which is a subnormal one there.
        scale = torch.where(exponent == 0, SUBNORMAL_BITS, exponent << FP32_MANTISSA_BITS).view(torch.float32)
        return _fp4_table(codes.device)[both.int()] * scale
