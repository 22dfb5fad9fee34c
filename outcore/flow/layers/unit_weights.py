"""The parameters of a unit as its code wants them: views of a slab on the device, or what stands for them in tiles."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from outcore.flow.parts import Part, bound
from outcore.flow.tiles import TiledParts
from outcore.flow.weights import InPlaceProducts


class PartWeights:
    """`tiles`: the units in tiles; None: all come in whole. `in_place`: computes with units that come as the bytes of
    their home, not expanded; None: none does."""

    def __init__(self, tiles: TiledParts | None = None, in_place: InPlaceProducts | None = None) -> None:
        self._tiles, self.in_place = tiles, in_place
        self._views: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}
        """Views of the few slabs there are, by (unit, address, whether they are bytes): made once, not for every call.
        A CPU's home of 16 bits is a slab as well as bytes to compute with."""
        self._home_views: dict[tuple[int, int], list[torch.Tensor]] = {}
        """Views of homes, by (unit, address); packed parameters as their bytes."""
        self._leaves: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        """Leaves by (unit, address). `torch.autograd.grad`, which is asked for gradients, leaves nothing at them."""

    def tiles_of(self, unit: Part) -> TiledParts | None:
        """Tiles of a unit; None for one that comes in whole."""
        return self._tiles if self._tiles is not None and unit in self._tiles else None

    def tensors(self, unit: Part, slab: torch.Tensor) -> list[Any]:
        """Parameters of the unit, in slot order."""
        if (tiles := self.tiles_of(unit)) is not None:
            return tiles.tensors(unit, slab)
        key = (unit.index, slab.data_ptr(), slab.dtype)
        if key not in self._views:
            if is_in_place(slab):
                assert self.in_place is not None
                self._views[key] = self.in_place.tensors(unit, slab)
            else:
                self._views[key] = unit.layout.views(slab)
        return self._views[key]

    def home_views(self, unit: Part, slab: torch.Tensor) -> list[torch.Tensor]:
        """Parameters in slot order, as the bytes of the part's home: packed ones stay packed."""
        key = (unit.index, slab.data_ptr())
        if key not in self._home_views:
            self._home_views[key] = unit.layout.home_views(slab)
        return self._home_views[key]

    def leaves(self, unit: Part, slab: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
        """(all parameters in slot order, those that autograd differentiates)."""
        if (tiles := self.tiles_of(unit)) is not None:
            return tiles.leaves(unit, slab)
        key = (unit.index, slab.data_ptr())
        if key not in self._leaves:
            leaves = [
                view.detach().requires_grad_(slot.trainable)
                for slot, view in zip(unit.layout.slots, self.tensors(unit, slab), strict=True)
            ]
            self._leaves[key] = leaves, [leaf for leaf in leaves if leaf.requires_grad]
        return self._leaves[key]


def is_in_place(slab: torch.Tensor) -> bool:
    """Whether these are the bytes of a unit's home, whose weights are computed where they are."""
    return slab.dtype == torch.uint8


def in_place(unit: Part, tensors: Any) -> AbstractContextManager[Any]:
    """Within this context the model's modules have these in place of the unit's parameters."""
    return bound(unit.owners, tensors)
