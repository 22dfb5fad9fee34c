"""How a model's units are held on the device, and which in tiles: the rule of `sizing.tiles` asked about them.

Tiling costs time (weights cross the link more often, see `weight` and `layers/tiled_head`), so nothing is tiled that
fits. Pure, but for `free_device_bytes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from outcore.common.quantities import format_gib
from outcore.flow.parts import ModelParts, Part, StreamUnsupported
from outcore.flow.tiles.matrix import TiledPart, has_tiles, is_large
from outcore.sizing.tiles import (
    HELD_WHOLE,
    Holding,
    Model,
    TilingWork,
    UnitSize,
    choose_tiling,
    held_bytes,
)

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
    """How units that come in whole are held."""

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
