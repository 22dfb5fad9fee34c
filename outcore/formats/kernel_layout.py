"""Layouts of the bytes of packed formats, as the GPU's kernels are compiled for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Again = Callable[[], object]
"""Queues work once more that was queued before, with the same addresses, without the Python that found them. It keeps
none of their memory, so whoever calls it sees to that being there."""

CHUNK_BYTES = 16
"""Bytes of codes that a thread takes together."""
EXPANDED_CHUNKS = 128
"""Chunks that a program expands."""


@dataclass(frozen=True)
class KernelLayout:
    """One layout."""

    name: str
    order: int
    """0: codes of 8 bits; -1: neighbours in a byte; else the low halves of so many chunks, then the high ones."""
    block_bytes: int = 0
    """Bytes of a block of ggml's; 0: codes have a plane of their own."""
    codes_at: int = 0
    """First byte of its codes."""
    has_offset: bool = False
    """Whether a value is scale * code - offset, rather than scale * code."""

    def block_chunks(self, block: int) -> int:
        """Number of chunks in a block of `block` values."""
        return block // (CHUNK_BYTES if self.order == 0 else 2 * CHUNK_BYTES)

    def planes(self, planes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(codes as bytes, scales or ggml's blocks as fp16, zero points where there are any)."""
        codes, scale, zero = [planes[0].view(torch.uint8), *planes[1:], None, None][:3]
        if self.block_bytes:
            scale = planes[0].view(torch.float16)
        assert codes is not None and scale is not None
        return codes, scale, zero

    def constants(self, block: int, *, has_zero: bool) -> dict[str, Any]:
        """Make the constants for which the kernels are compiled."""
        chunks = self.block_chunks(block)
        return {
            "FORMAT": self.name,
            "ORDER": self.order,
            "BLOCK_CHUNKS": chunks,
            "BLOCK_BYTES": self.block_bytes or chunks * CHUNK_BYTES,
            "CODES_AT": self.codes_at,
            "HAS_OFFSET": self.has_offset,
            "HAS_ZERO": has_zero,
        }

    def expand(
        self, block: int, planes: Sequence[torch.Tensor], table: torch.Tensor | None, out: torch.Tensor
    ) -> Again:
        """Queue the kernel that writes the values of contiguous planes [blocks, per_block], blocks of so many values,
        to `out`, rounded to its type: the reference's bits. `table`: values of the codes, where a format has one, for
        as long as the format is used. ImportError without Triton."""
        from outcore.formats.expansion_kernel import packed_expansion

        assert out.is_contiguous() and all(plane.is_contiguous() for plane in planes)
        codes, scale, zero = self.planes(planes)
        chunks = len(codes) * self.block_chunks(block)
        grid = (-(-chunks // EXPANDED_CHUNKS), 1, 1)
        memory = (codes, scale, codes if zero is None else zero, codes if table is None else table, out)
        constants = {**self.constants(block, has_zero=zero is not None), "CHUNKS": EXPANDED_CHUNKS}
        launch: Any = packed_expansion
        compiled = launch[grid](*memory, chunks, **constants)
        return partial(compiled[grid], *(tensor.data_ptr() for tensor in memory), chunks, *constants.values())
