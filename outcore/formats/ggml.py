"""Blocks of GGUF files as ggml defines them: Q4_0, Q4_1, Q8_0 (32 values), Q4_K, Q5_K, Q6_K (256).

A block is one run of bytes: fp16 scales, packed 6-bit scales of sub-blocks (K types), codes. The order of operations is
ggml's, so values are those of its own dequantizer to the bit. Layouts: ggml-common.h of llama.cpp.
"""

from __future__ import annotations

import torch

from outcore.formats.kquants import pack_q4_k, pack_q6_k
from outcore.formats.packed import PackedFormat, Plane

QK, QK_K = 32, 256
SCALE_BYTES = 12
"""8 scales and 8 minima of 6 bits each in a block of Q4_K or Q5_K."""


def half(raw: torch.Tensor) -> torch.Tensor:
    """fp16 in bytes [n, 2 k] as fp32 [n, k]."""
    # By arithmetic: bytes seen as numbers twice as wide would be a copy of their own in a compiled kernel, and torch
    # 2.13's compiler gets it wrong on the CPU.
    wide = raw.to(torch.int16)
    return (wide[:, ::2] | (wide[:, 1::2] << 8)).view(torch.float16).float()


def nibbles(codes: torch.Tensor, run: int) -> torch.Tensor:
    """uint8 [n, b] -> [n, b / run, 2, run]: of each run of bytes the low halves, then the high ones."""
    return shifted(codes, run, 4, 2)


def shifted(codes: torch.Tensor, run: int, bits: int, count: int) -> torch.Tensor:
    """uint8 [n, b] -> [n, b / run, count, run]: of each run of bytes `count` fields of `bits` bits, lowest first."""
    shifts = torch.arange(0, bits * count, bits, dtype=torch.uint8, device=codes.device).view(1, 1, count, 1)
    return (codes.unflatten(1, (-1, 1, run)) >> shifts) & ((1 << bits) - 1)


def sub_scales(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, minima) uint8 [n, 8] of the 12 bytes in a block of Q4_K or Q5_K."""
    low, high, both = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = torch.cat((low & 0x3F, (both & 0xF) | ((low >> 2) & 0x30)), dim=1)
    minima = torch.cat((high & 0x3F, (both >> 4) | ((high >> 2) & 0x30)), dim=1)
    return scales, minima


def _scales_of(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, minimum) fp32 [n, 8, 1] of a block of Q4_K or Q5_K."""
    scales, minima = sub_scales(block[:, 4 : 4 + SCALE_BYTES])
    return (half(block[:, :2]) * scales).unsqueeze(2), (half(block[:, 2:4]) * minima).unsqueeze(2)


class GgmlFormat(PackedFormat):
    """One plane: the blocks as the file has them."""

    def __init__(self, name: str, block: int, block_bytes: int) -> None:
        self.name, self.block = name, block
        self.planes = (Plane("blocks", torch.uint8, block_bytes),)


class Q8_0(GgmlFormat):
    """fp16 scale, 32 signed bytes: 8.5 bits."""

    def __init__(self) -> None:
        super().__init__("q8_0", QK, 34)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        (block,) = planes
        return block[:, 2:].view(torch.int8).float() * half(block[:, :2])

    def pack_blocks(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = values.abs().amax(dim=1, keepdim=True) / 127
        scaled = values * torch.where(scale == 0, 0.0, 1 / scale)
        codes = (scaled.abs() + 0.5).floor_() * scaled.sign()  # ggml rounds halves away from zero
        return (torch.cat((scale.half().view(torch.uint8), codes.to(torch.int8).view(torch.uint8)), dim=1),)


class Q4_0(GgmlFormat):
    """fp16 scale, 32 codes around 8: 4.5 bits."""

    def __init__(self) -> None:
        super().__init__("q4_0", QK, 18)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        (block,) = planes
        return half(block[:, :2]) * (nibbles(block[:, 2:], QK // 2).flatten(1).float() - 8)


class Q4_1(GgmlFormat):
    """fp16 scale and minimum, 32 codes: 5 bits."""

    def __init__(self) -> None:
        super().__init__("q4_1", QK, 20)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        (block,) = planes
        codes = nibbles(block[:, 4:], QK // 2).flatten(1).float()
        return half(block[:, :2]) * codes + half(block[:, 2:4])


class Q4_K(GgmlFormat):
    """8 sub-blocks of 32 with 6-bit scales and minima: 4.5 bits."""

    def __init__(self) -> None:
        super().__init__("q4_k", QK_K, 4 + SCALE_BYTES + QK_K // 2)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        (block,) = planes
        scale, minimum = _scales_of(block)
        codes = nibbles(block[:, 4 + SCALE_BYTES :], QK).flatten(1, 2).float()
        return (scale * codes - minimum).flatten(1)

    def pack_blocks(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (pack_q4_k(values),)


class Q5_K(GgmlFormat):
    """Q4_K with a fifth bit for each code: 5.5 bits."""

    def __init__(self) -> None:
        super().__init__("q5_k", QK_K, 4 + SCALE_BYTES + QK_K // 8 + QK_K // 2)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        (block,) = planes
        scale, minimum = _scales_of(block)
        start = 4 + SCALE_BYTES
        fifth = shifted(block[:, start : start + QK], QK, 1, 8).flatten(1, 2)
        codes = nibbles(block[:, start + QK :], QK).flatten(1, 2) | (fifth << 4)
        return (scale * codes.float() - minimum).flatten(1)


class Q6_K(GgmlFormat):
    """16 sub-blocks of 16 with 8-bit scales, codes around 32: 6.5625 bits."""

    def __init__(self) -> None:
        super().__init__("q6_k", QK_K, QK_K // 2 + QK_K // 4 + QK_K // 16 + 2)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        (block,) = planes
        low = nibbles(block[:, :128], 64).flatten(1)
        high = shifted(block[:, 128:192], 32, 2, 4).flatten(1)
        codes = (low | (high << 4)).float() - 32
        scale = half(block[:, 208:]) * block[:, 192:208].view(torch.int8).float()
        return (scale.unsqueeze(2) * codes.unflatten(1, (16, 16))).flatten(1)

    def pack_blocks(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (pack_q6_k(values),)
