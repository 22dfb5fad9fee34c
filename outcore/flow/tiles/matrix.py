"""What a unit computed in tiles consists of: large weights in row blocks, and a small slab of all that is small.

A *matrix* is a large weight (or one expert of a stacked one) that stays in its home; a *tile* is a block of its rows,
contiguous there, so that a tile is one range of the unit's slab and of its gradient. Norms, biases and small weights
are *resident*: they come up together, in a slab with a layout of its own. Pure bookkeeping, no memory is taken here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outcore.flow.parts import Part, SlabLayout, Slot, StreamUnsupported
from outcore.sizing.tiles import RESIDENT_SHARE

ROUND_ROWS = 64
"""Tiles of at least so many rows have a multiple of it: whole blocks of a GPU's matrix units."""


@dataclass(frozen=True)
class TiledMatrix:
    """A 2-D weight [num_rows, num_cols] at home, in tiles of `tile_rows` rows (the last one may be smaller)."""

    unit: Part
    slot: Slot
    start: int
    """Position of its first element in the unit's slab."""
    num_rows: int
    num_cols: int
    tile_rows: int

    @property
    def key(self) -> tuple[int, int]:
        """Unlike any other matrix's."""
        return self.unit.index, self.start

    @property
    def num_tiles(self) -> int:
        return -(-self.num_rows // self.tile_rows)

    def rows(self, tile: int) -> tuple[int, int]:
        """[first, last) row of a tile."""
        return tile * self.tile_rows, min(self.num_rows, (tile + 1) * self.tile_rows)

    def span(self, tile: int) -> tuple[int, int]:
        """[start, stop) of a tile in elements of the unit's slab (and, if trainable, of its gradient)."""
        first, last = self.rows(tile)
        return self.start + first * self.num_cols, self.start + last * self.num_cols

    @property
    def tile_numel(self) -> int:
        """Elements of the largest tile."""
        return min(self.tile_rows, self.num_rows) * self.num_cols


def is_large(slot: Slot, itemsize: int, tile_bytes: int) -> bool:
    """Whether a parameter is not resident. An embedding's adapters are: peft transposes them to look up rows."""
    if "lora_embedding_" in slot.name:
        return False
    return len(slot.shape) > 1 and slot.numel * itemsize > tile_bytes // RESIDENT_SHARE


def _length_of(weight: str) -> str:
    """The name of DoRA's lengths beside a weight."""
    return f"{weight.removesuffix('.weight')}.lora_magnitude_vector.weight"


def _is_of_stack(slot: Slot, slots: Sequence[Slot]) -> bool:
    """Whether this is a row for each expert of a stack (gpt-oss has such biases), or an adapter of all experts at once,
    of which each takes its columns."""
    stacked = {other.name.rpartition(".")[0] for other in slots if len(other.shape) == 3}
    stem, found, _ = slot.name.partition(".lora_")
    if found:
        return stem.removesuffix(".base_layer") in stacked
    return len(slot.shape) == 2 and slot.name.rpartition(".")[0] in stacked


class TiledPart:
    """A unit and how it is cut; see the module docstring. StreamUnsupported for a large weight that has no rows."""

    def __init__(self, unit: Part, tile_bytes: int) -> None:
        self.unit = unit
        self.matrices: dict[str, list[TiledMatrix]] = {}
        """Matrices by slot name: one for a 2-D weight, one for each expert of a 3-D one."""
        itemsize, names = unit.layout.dtype.itemsize, {slot.name for slot in unit.layout.slots}
        small: list[tuple[str, torch.nn.Parameter]] = []
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            if not is_large(slot, itemsize, tile_bytes) or _is_of_stack(slot, unit.layout.slots):
                small.append((slot.name, parameter))
            elif _length_of(slot.name) in names:
                raise StreamUnsupported(
                    f"{slot.name} is computed in tiles, and DoRA (use_dora) needs the lengths of all of its rows at "
                    "every step: leave use_dora out, or leave this layer out of lora_target_modules"
                )
            elif len(slot.shape) <= 3:
                self.matrices[slot.name] = _matrices(unit, slot, tile_bytes // itemsize)
            else:
                raise StreamUnsupported(
                    f"{slot.name} has {len(slot.shape)} dimensions and {slot.numel * itemsize} bytes: only matrices "
                    "and stacks of them are computed in tiles"
                )
        self.resident = SlabLayout(small)
        by_name = {slot.name: slot for slot in unit.layout.slots}
        self.resident_homes: list[tuple[Slot, Slot]] = [(by_name[slot.name], slot) for slot in self.resident.slots]
        """(place in the unit's slab, place in the resident slab)."""

    @property
    def all_matrices(self) -> list[TiledMatrix]:
        return [matrix for group in self.matrices.values() for matrix in group]

    @property
    def tile_numel(self) -> int:
        """Elements of its largest tile."""
        return max((matrix.tile_numel for matrix in self.all_matrices), default=0)


def _matrices(unit: Part, slot: Slot, tile_numel: int) -> list[TiledMatrix]:
    *stack, num_rows, num_cols = slot.shape
    tile_rows = max(1, min(num_rows, tile_numel // num_cols))
    if ROUND_ROWS <= tile_rows < num_rows:
        tile_rows -= tile_rows % ROUND_ROWS
    return [
        TiledMatrix(unit, slot, slot.offset + number * num_rows * num_cols, num_rows, num_cols, tile_rows)
        for number in range(stack[0] if stack else 1)
    ]
