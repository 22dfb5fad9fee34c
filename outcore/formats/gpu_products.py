"""Products of packed weights with a few rows of activations on a GPU, from the packed bytes there (`product_kernel`).

The bytes are read once for up to 16 rows, and nothing is expanded to memory. Sums are in fp32, in an order that is the
same in every run. Work is queued on the current stream, so CUDA graphs hold it. One stream of a device at a time: what
programs that share rows count is memory of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from outcore.formats.packed import PackedSpec

FULL_PROGRAMS = 8
"""Programs for each multiprocessor from which on rows of a weight are not shared by several."""
MOST_TILES = 1 << 16
"""Tiles of rows, times groups of lines, of one product that programs share."""


@dataclass(frozen=True)
class ProgramTile:
    """Share of one program."""

    rows: int
    chunks: int
    warps: int
    stages: int = 1


ONE_LINE, SOME_LINES = ProgramTile(8, 32, 4), ProgramTile(64, 4, 4)
"""Half as large as what was measured first (an H100: 0.36 and 0.19 of a copy's rate in NF4), where registers left room
for 8 warps of 64 on a multiprocessor: 12 to 36 have room now (counted by the compiler)."""
LINES = 16
"""Rows of activations that tensor cores take together."""


class DeviceProducts:
    """Products on one GPU."""

    def __init__(self, device: torch.device) -> None:
        from outcore.formats.product_kernel import packed_product

        self._kernel: Any = packed_product
        self.device = device
        self.tiles = {1: ONE_LINE, LINES: SOME_LINES}
        self._arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
        has_gpu = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if has_gpu else 1

    @staticmethod
    def can(spec: PackedSpec) -> bool:
        """Whether there is a kernel for a matrix like this one, or for one of a stack."""
        return len(spec.shape) > 1 and spec.shape[-1] % spec.format.block == 0 and spec.format.layout is not None

    def multiply(self, spec: PackedSpec, planes: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """x [m, columns] times the packed rows: [m, rows], in the type of x. `planes`: [blocks, per_block] on the
        device."""
        return self._run(spec, planes, x, None, len(x))

    def multiply_chosen(
        self, spec: PackedSpec, planes: Sequence[torch.Tensor], ids: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Product of each line with the matrix that it chose: [P, rows] in the type of x.

        `spec`: one matrix [rows, columns] of the stack; `planes`: [matrices, blocks, per_block], contiguous but for the
        first dimension (slots); `ids` [P]: int32 or int64, below 0 for a line of zeros; `x` [P / k, columns]: lines
        i * k to i * k + k - 1 are of its line i."""
        assert len(ids) % max(1, len(x)) == 0 and ids.is_contiguous()
        return self._run(spec, planes, x, ids, len(ids))

    def _run(
        self, spec: PackedSpec, planes: Sequence[torch.Tensor], x: torch.Tensor, ids: torch.Tensor | None, count: int
    ) -> torch.Tensor:
        layout, (rows, columns), block = spec.format.layout, spec.shape[-2:], spec.format.block
        assert layout is not None and x.shape[1] == columns
        x, out = x.contiguous(), torch.empty(count, rows, dtype=x.dtype, device=x.device)
        if not out.numel():
            return out
        lines = 1 if ids is not None or count == 1 else LINES
        tile = self.tiles[lines]
        chunks = columns // block * layout.block_chunks(block)
        row_tiles, groups, walks = -(-rows // tile.rows), -(-count // lines), -(-chunks // tile.chunks)
        splits = min(walks, max(1, FULL_PROGRAMS * self._processors // (row_tiles * groups)))
        each = -(-walks // splits)
        splits = -(-walks // each) if row_tiles * groups <= MOST_TILES else 1
        each = each if splits > 1 else walks
        partial = x.new_empty(splits * count * rows if splits > 1 else 1, dtype=torch.float32)
        codes, scale, zero = layout.planes(planes)
        table = spec.format.table(x.device)
        strides = [0 if plane is None or ids is None else plane.stride(0) for plane in (codes, scale, zero)]
        self._kernel[(row_tiles, splits, groups)](
            codes,
            scale,
            zero if zero is not None else codes,
            codes if table is None else table,
            x,
            ids if ids is not None else self._arrived,
            out,
            partial,
            self._arrived,
            rows,
            chunks,
            count,
            count // len(x),
            each,
            *strides,
            **layout.constants(block, has_zero=zero is not None),
            IS_CHOSEN=ids is not None,
            IS_EVEN=chunks % tile.chunks == 0,
            SPLITS=splits,
            LINES=lines,
            ROWS=tile.rows,
            CHUNKS=tile.chunks,
            PRECISION="ieee",
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out


@cache
def device_products(device: torch.device) -> DeviceProducts:
    """The products of that GPU. RuntimeError where Triton is missing."""
    try:
        return DeviceProducts(device)
    except ImportError as error:
        raise RuntimeError(f"products of packed weights on the GPU need Triton ({error})") from error
