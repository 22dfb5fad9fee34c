"""Memory in which gradients wait in RAM for the optimizer: a home for each unit, or an arena of limited size that
units share.

Deferred updates need the gradients of all units at once (2 B per parameter), because the global norm is known last.
With immediate updates a gradient is needed from its download until its unit is updated: the arena hands out memory of
exactly the unit's size when the gradient is shipped and takes it back when the update is over. When it is full,
shipping waits for an update; an arena that holds three of the largest gradients lets one arrive while another is
worked on, whatever the order of sizes.

A home of a unit's own is free from the update on to the next gradient. Parameters on NVMe wait there, as the update
made them, for the forward and the backward that come before: the drive is not asked for what has just gone to it, two
reads of 2 B per parameter, at no memory. It has them all the same before anybody may use them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from outcore.common.quantities import format_gib, round_up
from outcore.flow.parts import Part
from outcore.staging.pool import ALIGNMENT_BYTES, ExtentAllocator, HomeMemory, PoolExtent
from outcore.states import StateChunk


def gradient_bytes_of(unit: Part) -> int:
    return unit.layout.trainable_numel * unit.layout.dtype.itemsize


class GradientArena:
    """Gradients by unit. `limit_bytes` None: all have a home of their own. Used from one thread, `keep_weights` apart.

    `early`: a unit whose home is taken before all others' and whose update comes last: no wait makes its room free.
    `weights_from`: of units (by index) with a home of their own the first element behind which new parameters wait.
    ValueError for a limit that cannot hold the largest gradient (beside the early one's)."""

    def __init__(
        self,
        units: Sequence[Part],
        memory: HomeMemory,
        limit_bytes: int | None = None,
        *,
        early: Part | None = None,
        weights_from: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        trainable = [unit for unit in units if unit.is_trainable]
        self._held: dict[int, tuple[torch.Tensor, PoolExtent | None]] = {}
        self._allocator: ExtentAllocator | None = None
        self._weights_from: Mapping[int, int] = {}
        self._has_weights: set[int] = set()
        total_bytes = sum(round_up(gradient_bytes_of(unit), ALIGNMENT_BYTES) for unit in trainable)
        if limit_bytes is None or limit_bytes >= total_bytes:
            self.size_bytes, self._weights_from = total_bytes, weights_from
            in_pool = memory.which_pinned([(unit.index, gradient_bytes_of(unit)) for unit in trainable])
            for unit in trainable:
                pinned = unit.index in in_pool
                home = memory.take(gradient_bytes_of(unit), f"gradients of {unit.name}", pinned=pinned)
                self._held[unit.index] = (home.view(unit.layout.dtype), None)
            return
        together = [unit for unit in trainable if unit is early]
        together += sorted((unit for unit in trainable if unit is not early), key=gradient_bytes_of)[-1:]
        least_bytes = sum(round_up(gradient_bytes_of(unit), ALIGNMENT_BYTES) for unit in together)
        if round_up(limit_bytes, ALIGNMENT_BYTES) < least_bytes:
            raise ValueError(
                f"gradient_bytes {format_gib(limit_bytes)} cannot hold the gradient of "
                f"{' and '.join(unit.name for unit in together)}, {format_gib(least_bytes)}: give at least that, "
                "better three times as much"
            )
        self.size_bytes = round_up(limit_bytes, ALIGNMENT_BYTES)
        self._allocator = ExtentAllocator(self.size_bytes)
        self._memory = memory.take(self.size_bytes, "gradients")

    def try_take(self, unit: Part) -> torch.Tensor | None:
        """Take memory [layout.trainable_numel] for the unit's gradient until `give_back`; None without room."""
        held = self._held.get(unit.index)
        self._has_weights.discard(unit.index)
        if held is not None:
            return held[0]
        assert self._allocator is not None
        n_bytes = gradient_bytes_of(unit)
        extent = self._allocator.take(n_bytes)
        if extent is None:
            return None
        home = self._memory[extent.start_bytes : extent.start_bytes + n_bytes].view(unit.layout.dtype)
        self._held[unit.index] = (home, extent)
        return home

    def own_home(self, unit: Part) -> torch.Tensor | None:
        """The piece, up to where parameters wait, of the home that the unit keeps for good: free for others' use from
        its update on to its next gradient."""
        if self._allocator is not None or unit.index not in self._held:
            return None
        return self._held[unit.index][0][: self._weights_from.get(unit.index)]

    def keep_weights(self, chunk: StateChunk, param: torch.Tensor) -> bool:
        """Put the chunk's new parameters where its gradient was, if they wait there. False: whoever needs them waits
        until the drive has them, too, so nothing depends on how long the home keeps them."""
        index = chunk.unit.index
        if chunk.start >= self._weights_from.get(index, chunk.stop):
            target = self._held[index][0][chunk.start : chunk.stop]
            assert target.dtype == param.dtype and len(target) == len(param)
            ctypes.memmove(target.data_ptr(), param.data_ptr(), target.nbytes)  # lets other threads run meanwhile
            self._has_weights.add(index)
        return False

    def weights(self, unit: Part) -> torch.Tensor | None:
        """The end of the unit's slab as its last update made it; None where it waits on the drive only."""
        if unit.index not in self._has_weights:
            return None
        return self._held[unit.index][0][self._weights_from[unit.index] :]

    def forget_weights(self) -> None:
        """Read them from the drive: they have been changed there."""
        self._has_weights.clear()

    def __getitem__(self, unit: Part) -> torch.Tensor:
        """The unit's gradient; it has been taken and not given back."""
        return self._held[unit.index][0]

    def give_back(self, unit: Part) -> None:
        """The update is over. Homes of their own stay."""
        held = self._held.get(unit.index)
        if held is not None and held[1] is not None:
            assert self._allocator is not None
            del self._held[unit.index]
            self._allocator.give_back(held[1])
