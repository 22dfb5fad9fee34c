"""Integers of 4 bits in groups, each with a scale and, where the checkpoint has one, a zero point.

AWQ, GPTQ and compressed-tensors keep the same numbers in three orders; here they lie along a row, two in a byte, the
first in the low half. A value is (code - zero) * scale, rounded once. Symmetric ones have the zero 8 and no plane for
it. `outcore.formats.checkpoint` puts the three orders into this one without changing a number."""

from __future__ import annotations

import torch

from outcore.formats.kernel_layout import CHUNK_BYTES, KernelLayout
from outcore.formats.packed import PackedFormat, Plane

SYMMETRIC_ZERO = 8


class Int4(PackedFormat):
    """4 bits with a 16-bit scale for `block` columns. `scale_dtype`: as the checkpoint has it."""

    def __init__(self, block: int, scale_dtype: torch.dtype, *, has_zero: bool) -> None:
        kind = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[scale_dtype]
        self.name = f"int4_{block}_{kind}{'_zero' if has_zero else ''}"
        self.block = block
        zero = (Plane("zero", torch.uint8, 1),) if has_zero else ()
        self.planes = (Plane("codes", torch.uint8, block // 2), Plane("scale", scale_dtype, 1), *zero)
        self.layout = None if block % (2 * CHUNK_BYTES) else KernelLayout("int4", -1, has_offset=True)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        codes, scale = planes[:2]
        zero = planes[2].float() if len(planes) > 2 else SYMMETRIC_ZERO
        both = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(1)
        return (both.float() - zero) * scale.float()
