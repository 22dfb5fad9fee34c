"""Formats of optimizer states and of a packed base: bytes per parameter, in RAM and on a drive.

Their layouts are outcore/optim/formats and outcore/formats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from outcore.common.quantities import MIB

BLOCK_NUMEL = 256
"""Parameters that share the scales of 8-bit moments."""
_FP32, _EIGHT_BIT = 8, 2 + 8 / BLOCK_NUMEL
STATE_FORMATS: Mapping[str, tuple[int, float]] = MappingProxyType(
    {
        "fp32": (4, _FP32),
        "split": (2, _FP32),
        "fp32_m8": (4, _EIGHT_BIT),
        "split8": (2, _EIGHT_BIT),
        "fp24_m8": (1, _EIGHT_BIT),
    }
)
"""Format -> bytes per parameter of (master, moments). A split master is a 16-bit residual beside the bf16 parameter
(lossless), one of 24 bits an 8-bit one; 8-bit moments carry two fp32 scales per block."""
SPLIT_FORMATS = tuple(name for name, (master, _) in STATE_FORMATS.items() if master < 4)
"""Formats whose master is whole only together with the bf16 parameter."""
MOMENT_BYTES = 4
"""One of fp32: what a matrix that Muon updates has less than AdamW's states."""
NEWTON_SCHULZ_STEPS = 5
"""`torch.optim.Muon`'s; each is three products: 4 m^2 n + 2 m^3 operations with the shorter side m, the longer n."""
MUON_BYTES_UNDER_WAY = 512 * MIB
"""Memory on the device for matrices on their way, where more than two are: four of 2,048 x 5,632, and of smaller ones
as many as hide each other's waits."""
MUON_WORK_BYTES = 12
"""Per parameter, of one update: gradient and what is made orthogonal in fp32, the latter twice in bf16. Beside them are
three bf16 products of it with itself; a split master is joined to fp32."""
PLANES_BYTES, BLOCK_HEAD_BYTES = BLOCK_NUMEL * 7 // 2, 8
"""One compressed moment of a block, and the head of both (outcore/optim/formats/compressed.py)."""
COMPRESSED_MOMENTS = (2 * PLANES_BYTES + BLOCK_HEAD_BYTES) / BLOCK_NUMEL
"""Bytes per parameter of fp32 moments on a drive, without loss. What does not fit into that is next to nothing: 0.001
bytes per parameter and transfer for random gradients, measured. The CPU's rate is not counted: two cores update three
times what a drive of 7 GB/s brings and takes."""
COMPRESSION_ROOM = 1
"""Bytes per parameter kept free for it on the drive, and twice in a slot of the ring."""


def muon_flops(rows: int, columns: int) -> int:
    """Operations of Newton-Schulz on one matrix."""
    short, long = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)


def muon_device_bytes(matrices: Sequence[tuple[int, int]], master: int, element_bytes: int) -> int:
    """Device memory of the updates of these matrices, at its peak: gradients, states and parameters of those that are
    there, and what one update takes beside them."""
    if not matrices:
        return 0
    there = [(master + MOMENT_BYTES + 2 * element_bytes) * rows * columns for rows, columns in matrices]
    under_way = min(sum(there), max(sum(sorted(there)[-2:]), MUON_BYTES_UNDER_WAY))
    joined = 4 if master < 4 else 0
    return under_way + max(
        (joined + MUON_WORK_BYTES) * rows * columns + 3 * 2 * min(rows, columns) ** 2 for rows, columns in matrices
    )


@dataclass(frozen=True)
class PackedSize:
    """Bytes and quality of one packed format of a frozen base."""

    block: int
    """Columns that share a scale: rows that do not divide into them stay as they are."""
    block_bytes: int
    quality: str
    """Text for people."""

    def of(self, numel: int) -> int:
        """Bytes of so many values."""
        return numel // self.block * self.block_bytes

    @property
    def bits(self) -> float:
        """Bits a value."""
        return 8 * self.block_bytes / self.block


AS_PUBLISHED = "as its checkpoint has it"
QUANTIZED = {
    "int8": PackedSize(128, 132, "255 levels in each 128 values, little is lost"),
    "nf4": PackedSize(64, 36, "16 levels in each 64 values, what QLoRA trains on"),
}
"""Formats that `--quantize` takes, the larger first."""
_PUBLISHED = {
    name: PackedSize(block, block_bytes, AS_PUBLISHED)
    for name, block, block_bytes in (
        *(("mxfp4", 32, 17), ("q8_0", 32, 34), ("q4_0", 32, 18), ("q4_1", 32, 20)),
        *(("q4_k", 256, 144), ("q5_k", 256, 176), ("q6_k", 256, 210)),
    )
}


def packed_size(name: str) -> PackedSize:
    """Size of the packed format of that name, as `outcore.formats` has it (tests/plan/stream/test_packed.py holds it
    against the formats themselves). KeyError for a name that is none."""
    if found := QUANTIZED.get(name) or _PUBLISHED.get(name):
        return found
    if match := re.fullmatch(r"(?:fp8|int8)_(\d+)", name):  # a byte each, one fp32 scale
        return PackedSize(int(match[1]), int(match[1]) + 4, AS_PUBLISHED)
    if match := re.fullmatch(r"int4_(\d+)_(fp16|bf16|fp32)(_zero)?", name):
        extra = (4 if match[2] == "fp32" else 2) + (1 if match[3] else 0)
        return PackedSize(int(match[1]), int(match[1]) // 2 + extra, AS_PUBLISHED)
    raise KeyError(name)
