"""Packed formats, and places of the bytes of one packed weight.

A weight of shape [..., columns] is cut along its columns into blocks of `block` values that share a scale. A format
keeps them in one or more planes (codes, scales, zero points), each an array with the same bytes for every block, so
that any run of blocks can be expanded alone. `unpack_blocks` in torch is the exact reference and runs on every device;
on a GPU one kernel (`expansion_kernel`) reads the packed bytes and writes the 16-bit values, the same ones.

Every product of a scale and a code is exact in fp32 (at most 24 significant bits) or is the only rounding before the
last one, so that a compiler's fused multiply-add changes no bit."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import prod

import torch

from outcore.common.errors import line_of
from outcore.common.quantities import round_up
from outcore.formats.kernel_layout import Again, KernelLayout

logger = logging.getLogger(__name__)

PLANE_ALIGN_BYTES = 256
"""Each plane of a packed weight starts at a multiple of this: whole cache lines, and a whole slab grain."""
CHUNK_NUMEL = 1 << 21
"""Values expanded at a time without a compiler: 8 MiB of fp32, and a few times that in between."""


@dataclass(frozen=True)
class Plane:
    """One array of a packed weight."""

    name: str
    dtype: torch.dtype
    per_block: int
    """Elements of it that belong to one block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.per_block * self.dtype.itemsize


class PackedFormat(ABC):
    """A way to keep weights in few bits. Formats are stateless and compared by name."""

    name: str
    block: int
    """Values along a row that share a scale."""
    planes: tuple[Plane, ...]
    is_plain: bool = False
    """Whether its bytes are the values: 16-bit weights as they are."""
    layout: KernelLayout | None = None
    """Layout of its bytes for the GPU's kernels; None: they do not know it."""

    def table(self, device: torch.device) -> torch.Tensor | None:
        """Values of its codes, fp32, where the kernels look them up."""
        return None

    @property
    def bits(self) -> float:
        """Bits of one value, scales included."""
        return 8 * sum(plane.block_bytes for plane in self.planes) / self.block

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row in all planes together. ValueError when the row has a part of a block."""
        return self.num_blocks((columns,)) * sum(plane.block_bytes for plane in self.planes)

    def num_blocks(self, shape: Sequence[int]) -> int:
        """Blocks of a weight. ValueError when its rows do not divide into them."""
        if not shape or shape[-1] % self.block:
            raise ValueError(
                f"{self.name} packs {self.block} values of a row together, and rows of {shape[-1] if shape else 0} "
                "do not divide into that; keep this weight in 16 bits"
            )
        return prod(shape) // self.block

    @abstractmethod
    def unpack_blocks(self, *planes: torch.Tensor) -> torch.Tensor:
        """Values of n blocks, fp32 [n, block], from planes [n, per_block]: the exact reference."""

    def pack_blocks(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Planes [n, per_block] of fp32 values [n, block]. NotImplementedError where the format is only read."""
        raise NotImplementedError(f"weights can be read in {self.name}, but not packed into it")

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class PackedSpec:
    """Format and shape of one packed weight: its size, where its planes lie, and how it is expanded."""

    format: PackedFormat
    shape: tuple[int, ...]
    """Shape as packed: rows and blocks along the last dimension."""
    is_transposed: bool = False
    """Whether the model's parameter has the last two dimensions the other way round (gpt-oss)."""

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the model's parameter."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.is_transposed else self.shape

    @property
    def num_blocks(self) -> int:
        return self.format.num_blocks(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of all planes with the gaps between them."""
        return self._offsets()[-1]

    def _offsets(self) -> list[int]:
        offsets, blocks = [0], self.num_blocks
        for plane in self.format.planes:
            offsets.append(round_up(offsets[-1] + blocks * plane.block_bytes, PLANE_ALIGN_BYTES))
        return offsets

    def plane_ranges(self) -> list[tuple[int, int]]:
        """(first byte, bytes) of each plane; in it the matrices of a stack lie one behind the other."""
        sizes = (self.num_blocks * plane.block_bytes for plane in self.format.planes)
        return list(zip(self._offsets(), sizes, strict=False))

    def planes(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Views [blocks, per_block] of the packed bytes `data` (uint8, at least `size_bytes`)."""
        return [
            data[start : start + size].view(plane.dtype).view(self.num_blocks, plane.per_block)
            for plane, (start, size) in zip(self.format.planes, self.plane_ranges(), strict=True)
        ]

    def assemble(self, planes: Sequence[torch.Tensor]) -> torch.Tensor:
        """The packed bytes of these planes (any shapes, contiguous or not)."""
        data, end = torch.empty(self.size_bytes, dtype=torch.uint8), 0
        for (start, size), view, plane in zip(self.plane_ranges(), self.planes(data), planes, strict=True):
            data[end:start].zero_()
            view.copy_(plane.reshape(view.shape))
            end = start + size
        data[end:].zero_()
        return data

    def pack(self, value: torch.Tensor) -> torch.Tensor:
        """The packed bytes of a parameter (any float type), a few million values at a time."""
        if tuple(value.shape) != self.value_shape:
            raise ValueError(f"{self.format.name}: a weight of shape {tuple(value.shape)}, expected {self.value_shape}")
        rows = (value.transpose(-1, -2) if self.is_transposed else value).reshape(-1, self.format.block)
        data = torch.zeros(self.size_bytes, dtype=torch.uint8)
        views, step = self.planes(data), max(1, CHUNK_NUMEL // self.format.block)
        for start in range(0, len(rows), step):
            packed = self.format.pack_blocks(rows[start : start + step].float())
            for view, plane in zip(views, packed, strict=True):
                view[start : start + step].copy_(plane)
        return data

    def expand(self, data: torch.Tensor, out: torch.Tensor) -> Again | None:
        """Write the values of the packed bytes to `out` (of `value_shape`, contiguous, on the same device), rounded to
        its type. On a GPU the work is queued on the current stream; what does so again for these addresses, where one
        kernel does it all."""
        return self.expand_planes(self.planes(data), out)

    def expand_planes(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> Again | None:
        """`expand` from planes [blocks, per_block] that may be anywhere on the device of `out`."""
        assert tuple(out.shape) == self.value_shape and out.is_contiguous()
        if not self.is_transposed:
            return _expand_blocks(self.format, planes, out.view(-1, self.format.block))
        rows, columns = self.shape[-2:]
        matrices, per_matrix = out.view(-1, columns, rows), rows * columns // self.format.block
        for number, matrix in enumerate(matrices):  # one at a time: only one exists twice
            part = [plane[number * per_matrix : (number + 1) * per_matrix] for plane in planes]
            straight = torch.empty(rows, columns, dtype=out.dtype, device=out.device)
            _expand_blocks(self.format, part, straight.view(-1, self.format.block))
            matrix.copy_(straight.t())
        return None

    def unpack(self, data: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The parameter as a new tensor."""
        out = torch.empty(self.value_shape, dtype=dtype, device=data.device)
        self.expand(data, out)
        return out


@dataclass(frozen=True)
class PackedTensor:
    """A packed weight: its bytes and what they mean."""

    spec: PackedSpec
    data: torch.Tensor
    """uint8, 1-D, on the CPU."""

    def unpack(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The parameter's values."""
        return self.spec.unpack(self.data, dtype)


def _expand_blocks(packed_format: PackedFormat, planes: Sequence[torch.Tensor], out: torch.Tensor) -> Again | None:
    if out.device.type != "cuda":
        _expand_in_chunks(packed_format, planes, out)
    elif (layout := packed_format.layout) is None or not _has_triton():
        _gpu_form(packed_format).expand(out, planes)
    else:
        return layout.expand(packed_format.block, planes, packed_format.table(out.device), out)
    return None


def _expand_in_chunks(packed_format: PackedFormat, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    step = max(1, CHUNK_NUMEL // packed_format.block)
    for start in range(0, len(out), step):
        chunk = (plane[start : start + step] for plane in planes)
        out[start : start + step].copy_(packed_format.unpack_blocks(*chunk))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


class GpuForm:
    """The reference compiled, for formats that no kernel knows, whatever the number of blocks. Where the compiler does
    not work, which is said once, the reference in chunks: slower, with the same bits."""

    def __init__(self, packed_format: PackedFormat) -> None:
        def expand(out: torch.Tensor, *planes: torch.Tensor) -> None:
            out.copy_(packed_format.unpack_blocks(*planes))

        self._format = packed_format
        self._compiled: Callable[..., None] | None = torch.compile(expand, dynamic=True)

    def expand(self, out: torch.Tensor, planes: Sequence[torch.Tensor]) -> None:
        """Queue the work on the current stream."""
        if self._compiled is not None:
            from torch._dynamo.exc import TorchDynamoException  # late: importing the compiler takes 1.4 s
            from torch._inductor.exc import InductorError

            try:
                self._compiled(out, *planes)
                return
            except (TorchDynamoException, InductorError) as error:
                logger.warning("%s is expanded without a compiler, slower: %s", self._format.name, line_of(error))
                self._compiled = None
        _expand_in_chunks(self._format, planes, out)


@cache
def _gpu_form(packed_format: PackedFormat) -> GpuForm:
    return GpuForm(packed_format)
