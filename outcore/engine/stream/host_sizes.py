"""How much RAM an engine asks for: pinned memory, homes of gradients, and what states take on the drive instead."""

from __future__ import annotations

from itertools import accumulate

from outcore.common.quantities import GIB, round_up
from outcore.engine.stream.blueprint import Blueprint
from outcore.engine.stream.device_work import long_rows_ram_bytes
from outcore.engine.stream.gradients.arena import gradient_bytes_of, smallest_arena_bytes
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import ModelParts
from outcore.machine import available_ram_bytes
from outcore.optim import state_format
from outcore.sizing.streaming import STAY_LAYERS, lent_bytes, waits_from
from outcore.staging.pool import ALIGNMENT_BYTES

FREE_RAM_BYTES = 2 * GIB
"""Left free when gradients of all layers are given homes."""
SMALLEST_READ_AHEAD_SLOTS = 4
"""Two for whole units, two for tiles."""


def home_bytes(units: ModelParts, cuts: dict[int, int], settings: StreamSettings) -> int:
    """Homes in RAM that cross to the device: parameters before their unit's cut (`plan_cuts`), gradients, and states of
    matrices that Muon updates."""
    gradients = homes = 0
    for unit in units.all:
        homes += round_up(cuts[unit.index] * unit.layout.dtype.itemsize, ALIGNMENT_BYTES)
        gradients += round_up(gradient_bytes_of(unit), ALIGNMENT_BYTES)
    if settings.optimizer == "muon":
        states = state_format(settings.states).without_squares
        matrices = [s for unit in units.layer_units for s in unit.layout.trainable_slots if len(s.shape) == 2]
        homes += sum(round_up(states.chunk_bytes(slot.numel), ALIGNMENT_BYTES) for slot in matrices)
    limit = settings.gradient_bytes
    return homes + (gradients if limit is None else min(gradients, limit))


def pool_bytes(units: ModelParts, cuts: dict[int, int], settings: StreamSettings, kept_bytes: int) -> int:
    """Pinned memory to ask for: what may be taken, but no more than lanes, homes, weights read ahead and activation
    checkpoints (`kept_bytes`) can use."""
    ahead = 0
    if any(cuts[unit.index] < unit.layout.home_numel for unit in units.all):
        ahead = max(settings.weight_read_ahead_bytes, SMALLEST_READ_AHEAD_SLOTS * settings.slot_bytes)
    return min(settings.staging_bytes, settings.lane_bytes + home_bytes(units, cuts, settings) + ahead + kept_bytes)


def rank_pool_bytes(shared_bytes: int, settings: StreamSettings, kept_bytes: int, world_size: int) -> int:
    """Pinned memory of one rank's own: its lanes' slots, and activation checkpoints as far as `staging_bytes` reaches
    beyond the lanes of all ranks and what they share."""
    left = settings.staging_bytes - world_size * settings.lane_bytes - shared_bytes
    return settings.lane_bytes + min(kept_bytes, max(0, left) // world_size)


def checkpoint_bytes(plan: Blueprint) -> int:
    """RAM for activation checkpoints beyond what layers' gradients lend, or of long rows for all of them; 0 where they
    wait elsewhere, or a step's tokens are not known."""
    settings, place, ends = plan.settings, plan.place, _checkpoint_ends(plan)
    if (holding := plan.tile_plan.holding).tile_tokens:
        return long_rows_ram_bytes(plan.loaded, settings, plan.dtype.itemsize, near=holding.near)
    if plan.settings.activations_on(plan.device) != "ram" or not ends:
        return 0
    has_homes = plan.is_deferred or not place.is_alone or arena_bytes(plan.units, settings) is None
    leaving = plan.units.layer_units[: max(0, len(plan.units.layer_units) - STAY_LAYERS)]
    room = [
        gradient_bytes_of(unit) // place.world_size if has_homes and unit.index not in plan.tile_plan.indices else 0
        for unit in leaving
    ]
    return sum(ends[-1] - lent_bytes(ends, of_layer) for of_layer in room)


def _checkpoint_ends(plan: Blueprint) -> list[int]:
    """Bytes of a layer's checkpoints up to the end of each micro-batch; [] when a step's tokens are not known."""
    row_bytes = plan.loaded.facts.hidden_size * plan.dtype.itemsize
    sizes = (round_up(tokens * row_bytes, ALIGNMENT_BYTES) for tokens in plan.settings.step_tokens or ())
    return list(accumulate(sizes))


def weights_from(plan: Blueprint) -> dict[int, int]:
    """First element, of each layer (by index) partly on NVMe, that waits in its gradient's home from an update on
    (`sizing.streaming.waits_from`), at the beginning of a chunk."""
    found: dict[int, int] = {}
    ends, num_layers = _checkpoint_ends(plan), len(plan.units.layer_units)
    lends = plan.settings.activations_on(plan.device) == "ram" and not plan.tile_plan.holding.tile_tokens
    for number, unit in enumerate(plan.units.layer_units):
        layout, itemsize, lent = unit.layout, unit.layout.dtype.itemsize, 0
        if lends and number < num_layers - STAY_LAYERS:
            lent = lent_bytes(ends, gradient_bytes_of(unit)) if ends else gradient_bytes_of(unit)
        least = waits_from(
            layout.home_numel * itemsize,
            layout.trainable_numel * itemsize,
            plan.cuts[unit.index] * itemsize,
            lent,
            ranks=plan.place.world_size,
            in_tiles=unit.index in plan.tile_plan.indices,
        )
        starts = [chunk.start for chunk in plan.chunks[unit.index] if chunk.start * itemsize >= least]
        if starts:
            found[unit.index] = min(starts)
    return found


def read_ahead_bytes(units: ModelParts, cuts: dict[int, int], settings: StreamSettings, free_bytes: int) -> int:
    """Bytes to read ahead from a pool with `free_bytes` beside the lanes: what homes leave, or half of it where they
    do not all fit."""
    left = free_bytes - home_bytes(units, cuts, settings)
    return min(settings.weight_read_ahead_bytes, max(left, free_bytes // 2))


def arena_bytes(units: ModelParts, settings: StreamSettings) -> int | None:
    """RAM for gradients with immediate updates: as told, else all of them where RAM is free, else the least."""
    if settings.gradient_bytes is not None:
        return settings.gradient_bytes
    free_bytes = available_ram_bytes() - FREE_RAM_BYTES
    all_bytes = sum(gradient_bytes_of(unit) for unit in units.all)
    return None if all_bytes <= free_bytes else smallest_arena_bytes(units.all)
