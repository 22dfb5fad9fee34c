"""Weights of 16 bits as they are, as one more form for the CPU's kernels: nothing is packed, nothing expanded."""

from __future__ import annotations

import torch

from outcore.formats.packed import PackedFormat, Plane


class Plain(PackedFormat):
    """16-bit numbers; a block is a cache line of them."""

    block, is_plain = 32, True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.planes = (Plane("values", dtype, self.block),)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        return planes[0].float()

    def pack_blocks(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (values.to(self.dtype),)


PLAIN_FORMATS = {dtype: Plain(name, dtype) for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))}
"""Both formats, by the type of the weights."""
