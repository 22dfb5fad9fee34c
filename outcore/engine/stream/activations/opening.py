"""The home in which a run's activation checkpoints wait."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outcore.engine.stream.activations.memory import Activations, DeviceActivations, Lend, RamActivations
from outcore.engine.stream.activations.nvme import NvmeActivations
from outcore.engine.stream.blueprint import Blueprint
from outcore.engine.stream.gradients.arena import GradientArena
from outcore.flow.parts import ModelParts
from outcore.flow.weights import Scratch
from outcore.staging import DownloadLane, UploadLane
from outcore.staging.pool import ALIGNMENT_BYTES, HostMemory


def open_activations(
    plan: Blueprint,
    memory: HostMemory,
    lanes: tuple[UploadLane, DownloadLane],
    scratch: Scratch | None,
    arena: GradientArena,
    expect: Callable[[torch.Tensor], object],
) -> Activations:
    """On NVMe with the space that the settings say a step needs. Those of long rows have homes in RAM already, and
    `expect` is told which are taken soon."""
    num_layers = len(plan.units.layers)
    where = plan.settings.activations_on(plan.device)
    if plan.tile_plan.holding.tile_tokens:
        return DeviceActivations(expect)
    if where == "ram":
        lend = _lender(plan.units, arena, plan.tile_plan.indices, plan.place.rank, plan.place.world_size)
        return RamActivations(memory, *lanes, num_layers, lend=lend)
    if where == "nvme":
        assert scratch is not None
        activations = NvmeActivations(scratch, *lanes, num_layers)
        row_bytes = plan.loaded.facts.hidden_size * plan.dtype.itemsize
        activations.reserve([tokens * row_bytes for tokens in plan.settings.step_tokens or ()])
        return activations
    return DeviceActivations()


def _lender(units: ModelParts, arena: GradientArena, tiled: frozenset[int], rank: int, world_size: int) -> Lend:
    """Gradients' homes for checkpoints; a tiled layer's are written to while its checkpoints are still needed. Of homes
    that several ranks share each gets an equal piece: a sum is written there when all have used their checkpoints."""

    def lend(layer: int) -> torch.Tensor | None:
        if units.layer_units[layer].index in tiled:
            return None
        home = arena.own_home(units.layer_units[layer])
        if home is None:
            return None
        piece_bytes = home.nbytes // world_size // ALIGNMENT_BYTES * ALIGNMENT_BYTES if world_size > 1 else home.nbytes
        return home.view(torch.uint8)[rank * piece_bytes : (rank + 1) * piece_bytes]

    return lend
