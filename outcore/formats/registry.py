"""Formats by name."""

from __future__ import annotations

import re
from functools import cache

import torch

from outcore.formats.ggml import Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0
from outcore.formats.packed import PackedFormat
from outcore.formats.plain import PLAIN_FORMATS, Fp8, Int4, Int8, Mxfp4, Nf4

QUANTIZE_CHOICES = ("nf4", "int8")
"""What `--quantize` packs a 16-bit model into."""
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
