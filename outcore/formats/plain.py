"""Weights of 16 bits as they are, as one more form for the CPU's kernels: nothing is packed, nothing expanded.

Integers of 4 bits in groups, each with a scale and, where the checkpoint has one, a zero point.

AWQ, GPTQ and compressed-tensors keep the same numbers in three orders; here they lie along a row, two in a byte, the
first in the low half. A value is (code - zero) * scale, rounded once. Symmetric ones have the zero 8 and no plane for
it. `outcore.formats.checkpoint` puts the three orders into this one without changing a number.

Small floating-point numbers with scales: FP8 in blocks of 128 x 128 (DeepSeek, Qwen) and MXFP4 (gpt-oss).

FP8: e4m3 values and an fp32 scale ("weight_scale_inv") for each square block. A row keeps the scale of each of its
runs of columns beside them, so that any run of blocks can be expanded alone: 4 bytes for 128 values instead of for
16,384. MXFP4 (OCP microscaling 1.0): e2m1 codes, two in a byte, the first in the low half, and a power of two for 32.

NF4 in bitsandbytes' layout, and int8: one fp32 scale for each run of values, by absolute maximum.

NF4 (QLoRA, Dettmers et al. 2023): 16 code values, quantiles of a normal distribution, in blocks of 64; two codes in a
byte, the first in the high half. Values are code * absmax in fp32, rounded once to the type of the weights, and codes
are chosen by the same thresholds as bitsandbytes', so that packed bytes and gradients equal those of a resident model.
"""

from __future__ import annotations

from functools import cache

import torch

from outcore.formats.kernel_layout import CHUNK_BYTES, KernelLayout
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
def _nf4_thresholds(device: torch.device) -> torch.Tensor:
    """Midpoints of neighbouring codes."""
    table = _nf4_table(device)
    return (table[:-1] + table[1:]) / 2


def _where_packed(values: torch.Tensor) -> torch.Tensor:
    """The values on the GPU, where this process has one open: it packs 8 B values in seconds, a core in minutes. What
    is computed with them must round there as on a CPU: torch's division by a Python number does not."""
    return values.cuda() if torch.cuda.is_initialized() else values


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
        values = _where_packed(values)
        absmax = values.abs().amax(dim=1, keepdim=True)
        scaled = (values * (1.0 / absmax.clamp(min=LEAST_SCALE))).clamp_(-1, 1)
        codes = torch.bucketize(scaled, _nf4_thresholds(values.device)).to(torch.uint8)
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
        values = _where_packed(values)
        scale = values.abs().amax(dim=1, keepdim=True) / torch.tensor(INT8_MAX, device=values.device)
        codes = (values / scale.clamp(min=LEAST_SCALE)).round_().clamp_(-INT8_MAX, INT8_MAX)
        return codes.to(torch.int8), scale
