"""Contents of a unit that is computed in tiles: large weights in row blocks, and a small slab of all that is small.

A *matrix* is a large weight (or one expert of a stacked one) that stays in its home; a *tile* is a block of its rows,
contiguous there, so that a tile is one range of the unit's slab and of its gradient; of a packed one a range of each
plane, which is expanded when it has come up. Norms, biases and small weights are *resident*: they come up together, in
a slab with a layout of their own. Pure bookkeeping, no memory is taken here.

How a model's units are held on the device, and which in tiles: the rule of `sizing.tiles` asked about them.

Tiling costs time (weights cross the link more often, see `weight` and `layers/tiled_head`), so nothing is tiled that
fits. Pure, but for `free_device_bytes`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from outcore.common.quantities import format_gib, round_up
from outcore.flow.parts import ModelParts, Part, SlabLayout, Slot, StreamUnsupported
from outcore.formats import PackedSpec
from outcore.sizing.tiles import (
    HELD_WHOLE,
    RESIDENT_SHARE,
    Holding,
    Model,
    TilingWork,
    UnitSize,
    choose_tiling,
    held_bytes,
)

ROUND_ROWS = 64
"""Rows of a larger tile are a multiple of this: whole blocks of a GPU's matrix units."""
PACKED_ROWS = 4
"""Tiles of packed rows have a multiple of it, so that they begin at whole elements of the home, of up to 4 bytes."""
PLACE_ALIGN_NUMEL = 128
"""Ranges of a tile's planes lie so far apart on the device: whole vectors of a kernel's reads."""


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
    packed: PackedSpec | None = None
    """Format, rows and columns of this matrix where it is packed at home; None: it is there as it is."""
    planes: tuple[int, ...] = ()
    """Element of the unit's home with which each plane begins."""

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

    def pieces(self, tile: int) -> list[tuple[int, int, int]]:
        """[start, stop) of the unit's home that a tile is made of, and at which element of a buffer each comes."""
        if self.packed is None:
            return [(*self.span(tile), 0)]
        itemsize, (first, last) = self.unit.layout.dtype.itemsize, self.rows(tile)
        found, at = [], 0
        for plane, begin in zip(self.packed.format.planes, self.planes, strict=True):
            row_bytes = self.num_cols // self.packed.format.block * plane.block_bytes
            start, stop = begin + first * row_bytes // itemsize, begin + -(-last * row_bytes // itemsize)
            found.append((start, stop, at))
            at += round_up(stop - start, PLACE_ALIGN_NUMEL)
        return found

    @property
    def buffer_numel(self) -> int:
        """Elements that its largest tile takes where it comes up."""
        start, stop, at = self.pieces(0)[-1]
        return at + stop - start

    def expand(self, tile: int, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """The values [rows, num_cols] of a packed tile whose pieces are in `buffer`, to `out`, on one device."""
        assert self.packed is not None
        first, last = self.rows(tile)
        spec, planes = PackedSpec(self.packed.format, (last - first, self.num_cols)), []
        for plane, (_, _, at) in zip(spec.format.planes, self.pieces(tile), strict=True):
            data = buffer[at:].view(torch.uint8)[: spec.num_blocks * plane.block_bytes]
            planes.append(data.view(plane.dtype).view(spec.num_blocks, plane.per_block))
        spec.expand_planes(planes, out)


def is_large(slot: Slot, itemsize: int, tile_bytes: int) -> bool:
    """Whether a parameter is not resident. An embedding's adapters are: peft transposes them to look up rows."""
    if "lora_embedding_" in slot.name:
        return False
    return len(slot.shape) > 1 and slot.numel * itemsize > tile_bytes // RESIDENT_SHARE


def has_tiles(slot: Slot, itemsize: int) -> bool:
    """Whether runs of its rows are whole elements of the home: always, but for odd blocks of some packed stack."""
    if slot.packed is None:
        return True
    blocks = slot.packed.format.num_blocks(slot.packed.shape[-2:])
    return all(blocks * plane.block_bytes % itemsize == 0 for plane in slot.packed.format.planes)


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
    """A unit and how it is cut; see the module docstring. Of packed weights all are cut. StreamUnsupported for a large
    weight that has no rows."""

    def __init__(self, unit: Part, tile_bytes: int) -> None:
        self.unit = unit
        self.matrices: dict[str, list[TiledMatrix]] = {}
        """Matrices by slot name: one for a 2-D weight, one for each expert of a 3-D one."""
        itemsize, names = unit.layout.dtype.itemsize, {slot.name for slot in unit.layout.slots}
        small: list[tuple[str, torch.nn.Parameter]] = []
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            is_small = not is_large(slot, itemsize, tile_bytes) or _is_of_stack(slot, unit.layout.slots)
            if is_small and slot.packed is None:
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
    spec = slot.packed
    *stack, num_rows, num_cols = slot.shape if spec is None else spec.shape
    tile_rows = max(1, min(num_rows, tile_numel // num_cols))
    if tile_rows < num_rows:
        grain = ROUND_ROWS if tile_rows >= ROUND_ROWS else 1 if spec is None else PACKED_ROWS
        tile_rows = max(grain, tile_rows - tile_rows % grain)
    found = []
    for number in range(stack[0] if stack else 1):
        start = slot.offset + number * num_rows * num_cols
        own = None if spec is None else PackedSpec(spec.format, (num_rows, num_cols), spec.is_transposed)
        planes = () if spec is None else tuple(_plane_starts(slot, spec, number, unit.layout.dtype.itemsize))
        found.append(TiledMatrix(unit, slot, start, num_rows, num_cols, tile_rows, own, planes))
    return found


def _plane_starts(slot: Slot, spec: PackedSpec, number: int, itemsize: int) -> Iterator[int]:
    """Elements of the unit's home with which the planes of one matrix of a stack begin."""
    blocks = spec.format.num_blocks(spec.shape[-2:])
    for plane, (start_bytes, _) in zip(spec.format.planes, spec.plane_ranges(), strict=True):
        yield slot.home_offset + (start_bytes + number * blocks * plane.block_bytes) // itemsize


TilingChoice = Literal["auto", "on", "off", "tokens"]
RESIDENT_PERCENT = 60
"""Share of the device's memory that small parameters of a tiled unit may take."""


@dataclass(frozen=True)
class TilePlan:
    """The decision, and why."""

    tiled: tuple[TiledPart, ...]
    tile_bytes: int
    reason: str
    """One line for people."""
    chunk_bytes: int | None = None
    """Intermediates of an MLP that a tiled layer may hold at once; None: no limit is known."""
    holding: Holding = HELD_WHOLE
    """Holding of units that come in whole."""

    @property
    def indices(self) -> frozenset[int]:
        return frozenset(unit.unit.index for unit in self.tiled)


def free_device_bytes(device: torch.device, others_bytes: int = 0) -> int | None:
    """Memory that this process may still take of the device, under the allocator's cap if there is one; CPU: None.
    `others_bytes`: of what the driver has free, left to other programs."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    capped = int(total * torch.cuda.get_per_process_memory_fraction(device.index))  # takes no "cuda" alone
    return min(free + reserved - others_bytes, capped) - torch.cuda.memory_allocated(device)


def plan_tiles(
    units: ModelParts,
    choice: TilingChoice,
    device_bytes: int | None,
    tile_bytes: int | None,
    num_layer_buffers: int,
    sum_itemsize: int = 4,
    work_of: Callable[[int, int | None], TilingWork | None] = lambda tile_bytes, chunk_bytes: None,
    may_cut_rows: bool = True,
) -> TilePlan:
    """The rule's answer for these units (`choose_tiling`, whose arguments these are). StreamUnsupported when a unit
    that must be tiled cannot be, or rows that are to be cut."""
    found = choose_tiling(
        choice,
        device_bytes,
        tile_bytes,
        num_layer_buffers,
        lambda size: Model(_sizes(units, size), units.embed.layout.dtype.itemsize, sum_itemsize, units.tied),
        work_of,
        may_cut_rows=may_cut_rows,
    )
    holding, tile_bytes, chunk_bytes = found.holding, found.tile_bytes, found.chunk_bytes
    if choice == "tokens" and not holding.tile_tokens:
        raise StreamUnsupported(
            "tiling tokens: rows are cut where a step's tokens and the model's shape are known, attention is fused, "
            "and a micro-batch has more tokens than a tile (--tile_bytes)"
        )
    chosen = [unit for unit in units.all if unit.index in holding.tiled]
    if not chosen:
        reason = f"none ({format_gib(found.held.total)} of buffers)"
        return TilePlan((), tile_bytes, "nothing is large" if choice == "on" else reason, chunk_bytes, holding)
    tiled = tuple(TiledPart(unit, tile_bytes) for unit in sorted(chosen, key=lambda unit: unit.index))
    reason = f"{_in_words(chosen)} in tiles of {format_gib(tile_bytes)}"
    if choice == "on":
        return TilePlan(tiled, tile_bytes, f"{reason}, as asked", chunk_bytes, holding)
    assert device_bytes is not None, "nothing is tiled where no limit is known"
    for unit in tiled:
        if unit.resident.size_bytes > device_bytes * RESIDENT_PERCENT // 100:
            raise StreamUnsupported(
                f"{unit.unit.name} has {format_gib(unit.resident.size_bytes)} of small parameters, and the device only "
                f"{format_gib(device_bytes)}"
            )
    whole_bytes = held_bytes(found.model, Holding(layer_buffers=num_layer_buffers)).total
    reason += f": whole, weights and gradients would take {format_gib(whole_bytes)} of buffers, and the device has "
    return TilePlan(tiled, tile_bytes, f"{reason}{format_gib(device_bytes)}", chunk_bytes, holding)


def _sizes(units: ModelParts, tile_bytes: int) -> tuple[UnitSize, ...]:
    layers = {unit.index for unit in units.layer_units}
    return tuple(
        UnitSize(
            unit.index,
            unit.index in layers,
            unit.layout.home_bytes,
            unit.layout.trainable_numel,
            _has_large(unit, tile_bytes),
            unit.layout.size_bytes if unit.layout.packed_slots else 0,
        )
        for unit in units.all
    )


def _has_large(unit: Part, tile_bytes: int) -> bool:
    itemsize = unit.layout.dtype.itemsize
    if not all(has_tiles(slot, itemsize) for slot in unit.layout.slots):
        return False
    return any(is_large(slot, itemsize, tile_bytes) for slot in unit.layout.slots)


def _in_words(chosen: list[Part]) -> str:
    names = [unit.name for unit in sorted(chosen, key=lambda unit: unit.index)]
    layers = [name for name in names if name.startswith("layer ")]
    ends = [name for name in names if not name.startswith("layer ")]
    return " and ".join([*ends, *([f"{len(layers)} layers" if len(layers) > 1 else layers[0]] if layers else [])])
