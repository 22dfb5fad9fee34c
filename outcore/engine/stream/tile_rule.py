"""Which units are computed in tiles, from their sizes and the device's bytes alone: one rule for engine and planner.

Untiled, the device holds buffers for whole layers and for embedding or head, their gradients as autograd makes them,
the sums of these and two buffers in which they leave. When that is more than a share of the device's memory (the
rest is for activations and logits), embedding and head are tiled, then the largest layers, until it fits. Pure, and
without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.units import MIB

WEIGHTS_SHARE = 60
"""Percent of the device's memory that buffers of weights and gradients may take; activations get the rest."""
CHUNK_SHARE = 40
"""Percent of the device's memory that an MLP's intermediates may take in a tiled layer: its weights need little."""
MAX_TILE_BYTES = 64 * MIB
"""Larger ones fill the link no better (16 MiB reach 99 % of its rate) and compute no faster."""
TILES_PER_DEVICE = 96
"""Auto: tiles of the device's memory divided by this, at most. About ten tiles' bytes are held at a time."""
RESIDENT_SHARE = 4
"""Weights of at most a tile's bytes divided by this are resident: not cut."""


@dataclass(frozen=True)
class UnitSize:
    """What the rule knows of an embedding, a layer or a head (a tied one is there once)."""

    index: int
    is_layer: bool
    size_bytes: int
    trainable_numel: int
    is_large: bool
    """Whether a weight of it would be cut: others gain nothing from tiles."""


@dataclass(frozen=True)
class Buffers:
    """How units are held untiled."""

    num_layers: int
    """Layers on the device at a time."""
    itemsize: int
    sum_itemsize: int = 4
    tied: bool = False


def tile_bytes_of(device_bytes: int | None) -> int:
    """Bytes of a tile where nobody says."""
    if device_bytes is None:
        return MAX_TILE_BYTES
    return max(1, min(MAX_TILE_BYTES, device_bytes // TILES_PER_DEVICE))


def chunk_bytes_of(device_bytes: int) -> int:
    """Intermediates of an MLP that a tiled layer may hold at once."""
    return max(1, device_bytes * CHUNK_SHARE // 100)


def weights_budget(device_bytes: int) -> int:
    """What buffers of weights and gradients may take."""
    return device_bytes * WEIGHTS_SHARE // 100


def choose_tiled(units: Sequence[UnitSize], budget_bytes: int, buffers: Buffers) -> frozenset[int]:
    """Embedding and head first, for theirs is the cheaper way in tiles; then layers, the largest first.

    Empty: everything fits whole. When even all large units in tiles do not suffice, they all are.
    """

    def fits(tiled: set[int]) -> bool:
        return whole_bytes(units, tiled, buffers) <= budget_bytes

    layers = [unit for unit in units if unit.is_large and unit.is_layer]
    ends = {unit.index for unit in units if unit.is_large and not unit.is_layer}
    if fits(set()):
        return frozenset()
    chosen: set[int] = set()
    for size_bytes in [0, *sorted({unit.size_bytes for unit in layers}, reverse=True)]:
        chosen |= {unit.index for unit in layers if unit.size_bytes == size_bytes}
        if fits(ends | chosen):
            break
    return frozenset(chosen) if chosen and fits(chosen) else frozenset(ends | chosen)


def whole_bytes(units: Sequence[UnitSize], tiled: set[int] | frozenset[int], buffers: Buffers) -> int:
    """Device memory for weights and gradients of all units but the tiled ones."""
    layers = [unit for unit in units if unit.is_layer and unit.index not in tiled]
    ends = [unit for unit in units if not unit.is_layer and unit.index not in tiled]
    weights = max((unit.size_bytes for unit in layers), default=0) * min(buffers.num_layers, len(layers))
    weights += max((unit.size_bytes for unit in ends), default=0)
    largest = max((unit.trainable_numel for unit in (*layers, *ends)), default=0)
    made_and_leaving = 3 * largest * buffers.itemsize
    tied = ends[0].trainable_numel if buffers.tied and ends else 0
    return weights + made_and_leaving + (largest + tied) * buffers.sum_itemsize
