"""Which units are computed in tiles: those without which the device could not hold what streaming needs.

Untiled, the device holds buffers for whole layers and for embedding or head, their gradients as autograd makes them,
the sums of these in fp32 and two buffers in which they leave. When that is more than a share of the device's memory
(the rest is for activations and logits), embedding and head are tiled, then the largest layers, until it fits. Tiling
costs time (weights cross the link more often, see `tiles_weight` and `tiles_head`), so nothing is tiled that fits.
Pure, but for `free_device_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from outcore.engine.stream.shell import StreamUnsupported
from outcore.engine.stream.tiles import TiledUnit, is_large
from outcore.engine.stream.units import Unit, Units
from outcore.units import MIB, format_gib

TilingChoice = Literal["auto", "on", "off"]

WEIGHTS_SHARE = 60
"""Percent of the device's memory that buffers of weights and gradients may take; activations get the rest."""
CHUNK_SHARE = 40
"""Percent of the device's memory that an MLP's intermediates may take in a tiled layer: its weights need little."""
MAX_TILE_BYTES = 64 * MIB
"""Larger ones fill the link no better (16 MiB reach 99 % of its rate) and compute no faster."""
TILES_PER_DEVICE = 96
"""Auto: tiles of the device's memory divided by this, at most. About ten tiles' bytes are held at a time."""


@dataclass(frozen=True)
class TilePlan:
    """The decision, and why."""

    tiled: tuple[TiledUnit, ...]
    tile_bytes: int
    reason: str
    """One line for people."""
    chunk_bytes: int | None = None
    """Intermediates of an MLP that a tiled layer may hold at once; None: no limit is known."""

    @property
    def indices(self) -> frozenset[int]:
        return frozenset(unit.unit.index for unit in self.tiled)

    @property
    def tile_numel(self) -> int:
        return max((unit.tile_numel for unit in self.tiled), default=0)


def free_device_bytes(device: torch.device) -> int | None:
    """Memory that this process may still take of the device, under the allocator's cap if there is one; CPU: None."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    capped = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free + reserved, capped) - torch.cuda.memory_allocated(device)


def plan_tiles(
    units: Units,
    choice: TilingChoice,
    device_bytes: int | None,
    tile_bytes: int | None,
    num_layer_buffers: int,
    sum_itemsize: int = 4,
) -> TilePlan:
    """`device_bytes` None: unknown, nothing needs to be tiled. `tile_bytes` None: from `device_bytes`.

    StreamUnsupported when a unit that must be tiled cannot be.
    """
    if tile_bytes is None:
        tile_bytes = MAX_TILE_BYTES
        if device_bytes is not None:
            tile_bytes = max(1, min(tile_bytes, device_bytes // TILES_PER_DEVICE))
    chunk_bytes = None if device_bytes is None else max(1, device_bytes * CHUNK_SHARE // 100)
    if choice == "off":
        return TilePlan((), tile_bytes, "off")
    if choice == "on":
        chosen = [unit for unit in units.all if _has_large(unit, tile_bytes)]
        reason = f"{_in_words(chosen)} in tiles of {format_gib(tile_bytes)}, as asked" if chosen else "nothing is large"
        return TilePlan(tuple(TiledUnit(unit, tile_bytes) for unit in chosen), tile_bytes, reason, chunk_bytes)
    if device_bytes is None:
        return TilePlan((), tile_bytes, "none (no limit of device memory is known)")
    budget_bytes = device_bytes * WEIGHTS_SHARE // 100
    untiled_bytes = whole_bytes(units, frozenset(), num_layer_buffers, sum_itemsize)
    chosen = _choose(units, budget_bytes, tile_bytes, num_layer_buffers, sum_itemsize)
    if not chosen:
        return TilePlan((), tile_bytes, f"none ({format_gib(untiled_bytes)} of buffers fit the device)")
    tiled = tuple(TiledUnit(unit, tile_bytes) for unit in sorted(chosen, key=lambda unit: unit.index))
    for unit in tiled:
        if unit.resident.size_bytes > budget_bytes:
            raise StreamUnsupported(
                f"{unit.unit.name} has {format_gib(unit.resident.size_bytes)} of small parameters, and the device only "
                f"{format_gib(device_bytes)}"
            )
    reason = (
        f"{_in_words(chosen)} in tiles of {format_gib(tile_bytes)}: whole, weights and gradients would take "
        f"{format_gib(untiled_bytes)} of buffers, and the device has {format_gib(device_bytes)}"
    )
    return TilePlan(tiled, tile_bytes, reason, chunk_bytes)


def _choose(units: Units, budget_bytes: int, tile_bytes: int, num_layer_buffers: int, sum_itemsize: int) -> list[Unit]:
    """Embedding and head first, for theirs is the cheaper way in tiles; then layers, the largest first."""

    def fits(chosen: list[Unit]) -> bool:
        tiled = frozenset(unit.index for unit in chosen)
        return whole_bytes(units, tiled, num_layer_buffers, sum_itemsize) <= budget_bytes

    large = [unit for unit in units.all if _has_large(unit, tile_bytes)]
    layers = [unit for unit in large if unit in units.layer_units]
    ends = [unit for unit in large if unit not in units.layer_units]
    chosen: list[Unit] = []
    if fits(chosen):
        return chosen
    for size_bytes in [0, *sorted({unit.layout.size_bytes for unit in layers}, reverse=True)]:
        chosen += [unit for unit in layers if unit.layout.size_bytes == size_bytes]
        if fits(ends + chosen):
            break
    return chosen if chosen and fits(chosen) else ends + chosen


def whole_bytes(units: Units, tiled: frozenset[int], num_layer_buffers: int, sum_itemsize: int = 4) -> int:
    """Device memory for weights and gradients of all units but the tiled ones."""
    layers = [unit for unit in units.layer_units if unit.index not in tiled]
    ends = [unit for unit in {id(u): u for u in (units.embed, units.head)}.values() if unit.index not in tiled]
    trained = [unit.layout.trainable_numel for unit in (*layers, *ends)]
    itemsize = units.embed.layout.dtype.itemsize
    weights = max((unit.layout.size_bytes for unit in layers), default=0) * min(num_layer_buffers, len(layers))
    weights += max((unit.layout.size_bytes for unit in ends), default=0)
    largest = max(trained, default=0)
    made_and_leaving = 3 * largest * itemsize
    tied = units.embed.layout.trainable_numel if units.tied and ends else 0
    return weights + made_and_leaving + (largest + tied) * sum_itemsize


def _has_large(unit: Unit, tile_bytes: int) -> bool:
    itemsize = unit.layout.dtype.itemsize
    return any(is_large(slot, itemsize, tile_bytes) for slot in unit.layout.slots)


def _in_words(chosen: list[Unit]) -> str:
    names = [unit.name for unit in sorted(chosen, key=lambda unit: unit.index)]
    layers = [name for name in names if name.startswith("layer ")]
    ends = [name for name in names if not name.startswith("layer ")]
    return " and ".join([*ends, *([f"{len(layers)} layers" if len(layers) > 1 else layers[0]] if layers else [])])
