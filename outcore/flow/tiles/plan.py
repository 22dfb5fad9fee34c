"""How a model's units are held on the device, and which in tiles: the rule of `sizing.tiles` asked about them.

Tiling costs time (weights cross the link more often, see `weight` and `layers/tiled_head`), so nothing is tiled that
fits. Pure, but for `free_device_bytes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    choose_holding,
    chunk_bytes_of,
    held_bytes,
    tile_bytes_of,
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
    work_of: Callable[[int, int], TilingWork | None] = lambda tile_bytes, chunk_bytes: None,
    may_cut_rows: bool = True,
) -> TilePlan:
    """`device_bytes` None: unknown, nothing needs to be tiled. `tile_bytes` None: from `device_bytes`. `work_of`: what
    a step needs beside the units, for (tile bytes, chunk bytes); None where that is unknown. `may_cut_rows`: whether
    layers may run on tiles of tokens.

    StreamUnsupported when a unit that must be tiled cannot be, or rows that are to be cut."""
    if tile_bytes is None:
        tile_bytes = tile_bytes_of(device_bytes)
    chunk_bytes = None if device_bytes is None else chunk_bytes_of(device_bytes)
    holding = Holding(layer_buffers=num_layer_buffers)
    if choice == "on":
        chosen = [unit for unit in units.all if _has_large(unit, tile_bytes)]
        reason = f"{_in_words(chosen)} in tiles of {format_gib(tile_bytes)}, as asked" if chosen else "nothing is large"
        holding = replace(holding, tiled=frozenset(unit.index for unit in chosen))
        return TilePlan(tuple(TiledPart(unit, tile_bytes) for unit in chosen), tile_bytes, reason, chunk_bytes, holding)
    work = work_of(tile_bytes, chunk_bytes or 0)
    if choice == "tokens" and (work is None or not work.long):
        raise StreamUnsupported(
            "tiling tokens: rows are cut where a step's tokens and the model's shape are known, attention is fused, "
            "and a micro-batch has more tokens than a tile (--tile_bytes)"
        )
    if device_bytes is None or chunk_bytes is None:
        if choice == "tokens" and work is not None:
            holding = holding.cut_as(work.long[-1])
            return TilePlan((), tile_bytes, f"{holding.words()}, as asked", None, holding)
        return TilePlan((), tile_bytes, "none (no limit of device memory is known)", None, holding)
    model = Model(_sizes(units, tile_bytes), units.embed.layout.dtype.itemsize, sum_itemsize, units.tied)
    whole_bytes = held_bytes(model, holding).total
    holding = choose_holding(
        model,
        device_bytes,
        tile_bytes,
        layer_buffers=num_layer_buffers,
        work=work,
        may_tile=choice != "off",
        cuts_rows=True if choice == "tokens" else None if choice == "auto" and may_cut_rows else False,
    )
    chosen = [unit for unit in units.all if unit.index in holding.tiled]
    if not chosen:
        reason = f"none ({format_gib(held_bytes(model, holding).total)} of buffers)"
        return TilePlan((), tile_bytes, reason, chunk_bytes, holding)
    tiled = tuple(TiledPart(unit, tile_bytes) for unit in sorted(chosen, key=lambda unit: unit.index))
    for unit in tiled:
        if unit.resident.size_bytes > device_bytes * RESIDENT_PERCENT // 100:
            raise StreamUnsupported(
                f"{unit.unit.name} has {format_gib(unit.resident.size_bytes)} of small parameters, and the device only "
                f"{format_gib(device_bytes)}"
            )
    reason = (
        f"{_in_words(chosen)} in tiles of {format_gib(tile_bytes)}: whole, weights and gradients would take "
        f"{format_gib(whole_bytes)} of buffers, and the device has {format_gib(device_bytes)}"
    )
    return TilePlan(tiled, tile_bytes, reason, chunk_bytes, holding)


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
