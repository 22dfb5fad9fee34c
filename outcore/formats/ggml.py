"""Blocks of GGUF files as ggml defines them: Q4_0, Q4_1, Q8_0 (32 values), Q4_K, Q5_K, Q6_K (256).

A block is one run of bytes: fp16 scales, packed 6-bit scales of sub-blocks (K types), codes. The order of operations is
ggml's, so values are those of its own dequantizer to the bit. Layouts: ggml-common.h of llama.cpp.

Packing into Q4_K and Q6_K: for each sub-block the scale (and minimum) with the least weighted squared error.

The `gguf` package reads these types but does not write them. The search is the one that ggml documents: try scales
around the obvious one, round the values to codes, then fit scale and minimum to those codes by weighted least squares,
and keep the best. Large values weigh more (their own size plus the block's mean size). All sub-blocks at once in torch.

Formats by name."""

from __future__ import annotations

import re
from functools import cache

import torch

from outcore.formats.kernel_layout import KernelLayout
from outcore.formats.packed import PackedFormat, Plane
from outcore.formats.plain import PLAIN_FORMATS, Fp8, Int4, Int8, Mxfp4, Nf4

SUB_Q4, SUB_Q6 = 32, 16
TRIES_Q4 = tuple(0.1 * step - 1.0 for step in range(21))
TRIES_Q6 = tuple(0.1 * step for step in range(-9, 10))
LEAST = 1e-30


def fit_with_minimum(values: torch.Tensor, top: int, tries: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, minimum) [..., 1], both at least 0, so that scale * code - minimum with codes 0..top is near `values`."""
    weights = values.square().mean(-1, keepdim=True).sqrt() + values.abs()
    low = values.amin(-1, keepdim=True).clamp(max=0.0)
    span = (values.amax(-1, keepdim=True) - low).clamp(min=0.0)
    best_scale, best_low = span / top, low
    best_error = _error(values, weights, best_scale, best_low, top)
    sum_w, sum_x = weights.sum(-1, keepdim=True), (weights * values).sum(-1, keepdim=True)
    for extra in tries:
        codes = ((values - low) * ((top + extra) / span.clamp(min=LEAST))).round_().clamp_(0, top)
        weighted = weights * codes
        sum_l, sum_l2 = weighted.sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        sum_xl = (weighted * values).sum(-1, keepdim=True)
        determinant = (sum_w * sum_l2 - sum_l * sum_l).clamp(min=LEAST)
        scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        without = sum_xl / sum_l2.clamp(min=LEAST)  # minima cannot be above zero: fit the scale alone then
        scale = torch.where(new_low > 0, without, scale).clamp(min=0.0)
        new_low = new_low.clamp(max=0.0)
        error = _error(values, weights, scale, new_low, top)
        better = error < best_error
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, new_low, best_low)
        best_error = torch.where(better, error, best_error)
    return best_scale, -best_low


def _error(
    values: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, top: int
) -> torch.Tensor:
    codes = ((values - low) / scale.clamp(min=LEAST)).round_().clamp_(0, top)
    return (weights * (scale * codes + low - values).square_()).sum(-1, keepdim=True)


def fit_symmetric(values: torch.Tensor, top: int, tries: tuple[float, ...]) -> torch.Tensor:
    """scale [..., 1], of either sign, so that scale * code with codes -top..top - 1 is near `values`."""
    weights = values.square()
    largest = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    best_scale, best_gain = torch.zeros_like(largest), torch.full_like(largest, -1.0)
    safe = torch.where(largest.abs() < LEAST, LEAST, largest)
    for extra in tries:
        codes = (values * (-(top + extra) / safe)).round_().clamp_(-top, top - 1)
        sum_xl = (weights * values * codes).sum(-1, keepdim=True)
        sum_l2 = (weights * codes * codes).sum(-1, keepdim=True).clamp(min=LEAST)
        better = sum_xl.square() / sum_l2 > best_gain
        best_scale = torch.where(better, sum_xl / sum_l2, best_scale)
        best_gain = torch.where(better, sum_xl.square() / sum_l2, best_gain)
    return torch.where(largest.abs() < LEAST, 0.0, best_scale)


def _half(value: torch.Tensor) -> torch.Tensor:
    """Bytes [n, 2] of fp32 [n, 1] as fp16."""
    return value.half().contiguous().view(torch.uint8)


def _codes(values: torch.Tensor, scale: torch.Tensor, low: int, top: int) -> torch.Tensor:
    """Codes for fixed scales; 0 where the scale is 0."""
    return (values / torch.where(scale == 0, 1.0, scale)).round_().clamp_(low, top) * (scale != 0)


def pack_q4_k(values: torch.Tensor) -> torch.Tensor:
    """fp32 [n, 256] -> blocks uint8 [n, 144]."""
    subs = values.unflatten(1, (8, SUB_Q4))
    scale, minimum = (found.squeeze(2) for found in fit_with_minimum(subs, 15, TRIES_Q4))
    whole = scale.amax(1, keepdim=True) / 63
    whole_minimum = minimum.amax(1, keepdim=True) / 63
    scales = _codes(scale, whole, 0, 63).to(torch.uint8)
    minima = _codes(minimum, whole_minimum, 0, 63).to(torch.uint8)
    final = (whole.half().float() * scales).unsqueeze(2)
    final_minimum = (whole_minimum.half().float() * minima).unsqueeze(2)
    codes = _codes(subs + final_minimum, final, 0, 15).to(torch.uint8).unflatten(1, (4, 2))
    low = (scales[:, :4] & 0x3F) | ((scales[:, 4:] >> 4) << 6)
    high = (minima[:, :4] & 0x3F) | ((minima[:, 4:] >> 4) << 6)
    both = (scales[:, 4:] & 0xF) | ((minima[:, 4:] & 0xF) << 4)
    packed = (codes[:, :, 0] | (codes[:, :, 1] << 4)).flatten(1)
    return torch.cat((_half(whole), _half(whole_minimum), low, high, both, packed), dim=1)


def pack_q6_k(values: torch.Tensor) -> torch.Tensor:
    """fp32 [n, 256] -> blocks uint8 [n, 210]."""
    subs = values.unflatten(1, (16, SUB_Q6))
    scale = fit_symmetric(subs, 32, TRIES_Q6).squeeze(2)
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    whole = -largest / 128
    scales = _codes(scale, whole, -128, 127)
    final = (whole.half().float() * scales).unsqueeze(2)
    codes = (_codes(subs, final, -32, 31) + 32).to(torch.uint8).flatten(1)
    halves = codes.unflatten(1, (2, 4, 32))  # two halves of four runs of 32
    low = (halves[:, :, :2] & 0xF) | ((halves[:, :, 2:] & 0xF) << 4)
    high = halves >> 4
    high = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    signed = scales.to(torch.int8).view(torch.uint8)
    return torch.cat((low.flatten(1), high.flatten(1), signed, _half(whole)), dim=1)


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

    def __init__(self, name: str, block: int, block_bytes: int, order: int, codes_at: int, *, has_offset: bool) -> None:
        self.name, self.block = name, block
        self.planes = (Plane("blocks", torch.uint8, block_bytes),)
        self.layout = KernelLayout(name, order, block_bytes, codes_at, has_offset)


class Q8_0(GgmlFormat):
    """fp16 scale, 32 signed bytes: 8.5 bits."""

    def __init__(self) -> None:
        super().__init__("q8_0", QK, 34, 0, 2, has_offset=False)

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
        super().__init__("q4_0", QK, 18, 1, 2, has_offset=True)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        (block,) = planes
        return half(block[:, :2]) * (nibbles(block[:, 2:], QK // 2).flatten(1).float() - 8)


class Q4_1(GgmlFormat):
    """fp16 scale and minimum, 32 codes: 5 bits."""

    def __init__(self) -> None:
        super().__init__("q4_1", QK, 20, 1, 4, has_offset=True)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        (block,) = planes
        codes = nibbles(block[:, 4:], QK // 2).flatten(1).float()
        return half(block[:, :2]) * codes + half(block[:, 2:4])


class Q4_K(GgmlFormat):
    """8 sub-blocks of 32 with 6-bit scales and minima: 4.5 bits."""

    def __init__(self) -> None:
        codes_at = 4 + SCALE_BYTES
        super().__init__("q4_k", QK_K, codes_at + QK_K // 2, 2, codes_at, has_offset=True)

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
        codes_at = 4 + SCALE_BYTES + QK_K // 8
        super().__init__("q5_k", QK_K, codes_at + QK_K // 2, 2, codes_at, has_offset=True)

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
        super().__init__("q6_k", QK_K, QK_K // 2 + QK_K // 4 + QK_K // 16 + 2, 4, 0, has_offset=True)

    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        (block,) = planes
        low = nibbles(block[:, :128], 64).flatten(1)
        high = shifted(block[:, 128:192], 32, 2, 4).flatten(1)
        codes = (low | (high << 4)).float() - 32
        scale = half(block[:, 208:]) * block[:, 192:208].view(torch.int8).float()
        return (scale.unsqueeze(2) * codes.unflatten(1, (16, 16))).flatten(1)

    def pack_blocks(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (pack_q6_k(values),)


QUANTIZE_CHOICES = ("nf4", "int8")
"""Formats into which `--quantize` packs a 16-bit model."""
_PLAIN: dict[str, type[PackedFormat]] = {
    "nf4": Nf4,
    "int8": Int8,
    "mxfp4": Mxfp4,
    "q8_0": Q8_0,
    "q4_0": Q4_0,
    "q4_1": Q4_1,
    "q4_k": Q4_K,
    "q5_k": Q5_K,
    "q6_k": Q6_K,
}
_OF_16_BITS = {plain.name: plain for plain in PLAIN_FORMATS.values()}
_INT4 = re.compile(r"int4_(\d+)_(fp16|bf16|fp32)(_zero)?")
_SIZED: dict[str, type[Fp8] | type[Int8]] = {"fp8": Fp8, "int8": Int8}
"""Formats that take the columns of a block."""
_SCALE_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@cache
def packed_format(name: str) -> PackedFormat:
    """The format of that name, the same object each time. ValueError naming the known ones."""
    if name in _PLAIN:
        return _PLAIN[name]()
    if name in _OF_16_BITS:
        return _OF_16_BITS[name]
    if match := _INT4.fullmatch(name):
        return Int4(int(match[1]), _SCALE_TYPES[match[2]], has_zero=bool(match[3]))
    kind, _, block = name.partition("_")
    if kind in _SIZED and block.isdecimal():
        return _SIZED[kind](int(block))
    known = ", ".join(
        [
            *_PLAIN,
            *_OF_16_BITS,
            "fp8_128, int8_64 (a number of columns)",
            "int4_128_fp16[_zero] (columns, type of scales)",
        ]
    )
    raise ValueError(f"there is no packed format {name!r}. Known are {known}.")
