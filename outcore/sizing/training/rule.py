"""The rule that places a training run, which the engine follows and the planner forecasts by. Pure, and without torch.

RAM first, NVMe when RAM is full. Gradients and activation checkpoints come first: they have no other home. Then
parameters (each of their bytes moves three times a step), then states (twice); where most of a model is frozen the
other way round, since its base is only read. A layer's checkpoints lie where its gradient will be, as far as they fit:
that home is free from the layer's update on to its next gradient."""

from __future__ import annotations

from dataclasses import replace

from outcore.common.quantities import round_up
from outcore.sizing.ring import BLOCK_BYTES, LEAST_MATRICES
from outcore.sizing.states import COMPRESSED_MOMENTS, COMPRESSION_ROOM, MOMENT_BYTES, STATE_FORMATS
from outcore.sizing.streaming import (
    CHUNK_NUMEL,
    STAY_LAYERS,
    PinnedMemory,
    lent_bytes,
    rank_slots_bytes,
    ring_of_states_bytes,
    ring_share_bytes,
)
from outcore.sizing.training.needs import PartNeeds, TrainingNeeds
from outcore.sizing.training.placement import Pins, TrainingLimits, TrainingPlacement, tiled_parts

LEAST_GRADIENTS = 3
"""Gradients' worth of the largest part that an arena holds at least: one arrives while another is worked on."""
COMPRESSED_HEAD_BYTES = 64
"""A chunk's own head where its moments are compressed."""
ROUNDS = 3
"""Times that the split is made: what flows from the drive takes room, so more may have to go there."""


def place_training(needs: TrainingNeeds, limits: TrainingLimits) -> TrainingPlacement:
    """Decide. What does not fit is placed all the same: `homes` says how much it takes."""
    whole = _everything(needs, limits)
    if told := limits.told:
        return _with(whole, limits, told.weight_ram_bytes, told.state_ram_bytes)
    over = whole.homes + whole.lanes - limits.ram_bytes
    if over > 0 and not limits.waits_for_norm and needs.ranks == 1:  # gradients are used up as they come
        fewer = max(least_gradients(needs), needs.gradients - over)
        shared = replace(limits, gradient_bytes=fewer)
        if (less := _everything(needs, shared)).fixed < whole.fixed:
            return _split(less, shared)
    return _split(whole, limits)


def _everything(needs: TrainingNeeds, limits: TrainingLimits) -> TrainingPlacement:
    """The placement with all of it in RAM."""
    lent, beyond = checkpoint_homes(needs, limits)
    gradients = needs.gradients if limits.gradient_bytes is None else min(needs.gradients, limits.gradient_bytes)
    slots = 0
    if needs.ranks > 1:
        sizes = [round_up(needs.gradient_bytes(part), BLOCK_BYTES) for part in needs.parts]
        slots = needs.ranks * max(BLOCK_BYTES, rank_slots_bytes(sizes))
    placed = TrainingPlacement(
        needs, None, cut_homes(needs, None, limits.chunk_numel), needs.states, gradients, lent, beyond, slots,
        ring=0, read_ahead=0, pinned=_pinned(limits, 0, needs.ranks),
        has_homes=limits.gradient_bytes is None, holding=limits.holding, waits_for_norm=limits.waits_for_norm,
        stored_chunk=chunk_bytes(needs.state_format, CHUNK_NUMEL, compresses=limits.flows.compressed, tails=1),
    )  # fmt: skip
    return replace(placed, pinned=_pinned(limits, placed.crossing, needs.ranks))


def checkpoint_homes(needs: TrainingNeeds, limits: TrainingLimits) -> tuple[tuple[int, ...], int]:
    """(bytes of each layer's activation checkpoints that its gradient's home is lent, of one rank; bytes of RAM for the
    others, of all ranks). Those of the last layers stay on the device."""
    none = (0,) * len(needs.layers)
    if limits.long_rows is not None:
        return none, needs.ranks * limits.long_rows
    if not limits.checkpoints_in_ram:
        return none, 0
    leaving, ends = max(0, len(needs.layers) - STAY_LAYERS), needs.checkpoint_ends
    tiled = tiled_parts(needs, limits.holding)
    homes = [needs.gradient_bytes(layer) // needs.ranks for layer in needs.layers]
    lent = tuple(
        (lent_bytes(ends, home) if ends else home)  # all of it where the first step says how much
        if number < leaving and number not in tiled and limits.gradient_bytes is None
        else 0
        for number, home in enumerate(homes)
    )
    return lent, needs.ranks * (leaving * ends[-1] - sum(lent)) if ends else 0


def least_gradients(needs: TrainingNeeds) -> int:
    """RAM that an arena of gradients takes at least; no more than all of them together."""
    sizes = [round_up(needs.gradient_bytes(part), BLOCK_BYTES) for part in needs.parts]
    return min(sum(sizes), LEAST_GRADIENTS * max(sizes))


def _split(everything: TrainingPlacement, limits: TrainingLimits) -> TrainingPlacement:
    """The placement with parameters and states in RAM as far as they fit."""
    needs = everything.needs
    room = limits.ram_bytes - everything.fixed
    flowing = _with(everything, limits, 0 if limits.weights_may_spill else None, None).lanes
    placed = everything
    for _ in range(ROUNDS):
        left = max(0, room - flowing)
        weights, states = needs.weights, needs.states
        if everything.states_first:
            states = min(states, left) if limits.states_may_spill else states
            weights = min(weights, max(0, left - states)) if limits.weights_may_spill else weights
        else:
            weights = min(weights, left) if limits.weights_may_spill else weights
            states = min(states, max(0, left - weights)) if limits.states_may_spill else states
        placed = _with(everything, limits, weights, states)
        flowing = max(flowing, placed.flowing + placed.lanes)
    return placed


def _with(
    placed: TrainingPlacement, limits: TrainingLimits, weights: int | None, states: int | None
) -> TrainingPlacement:
    """The placement with so much of both in RAM (None: all), and what follows from that."""
    needs = placed.needs
    budget = None if weights is None or weights >= needs.weights else weights
    whole = tiled_parts(needs, limits.holding) - frozenset(range(len(needs.layers)))
    cuts = cut_homes(needs, budget, limits.chunk_numel, whole)
    states = needs.states if states is None else min(needs.states, states)
    placed = replace(placed, weight_budget=budget, cuts=cuts, states=states)
    return replace(
        placed,
        ring=_ring_bytes(placed, limits),
        read_ahead=limits.read_ahead_bytes if placed.spilled_weights else 0,
        pinned=_pinned(limits, placed.crossing, needs.ranks),
    )


def _ring_bytes(placed: TrainingPlacement, limits: TrainingLimits) -> int:
    """RAM through which the drive's states flow, with their piece of the parameters where those are there, too: whole
    slots of the largest chunk, or of the largest matrix that Muon updates, in a ring of each rank."""
    needs = placed.needs
    if not placed.spilled_states:
        return 0
    of_param = needs.element_bytes if placed.spilled_weights else 0
    spilled = (needs.trained - needs.muon_params) * placed.spilled_states // max(1, needs.states)
    chunks, numel = -(-spilled // limits.chunk_numel), limits.chunk_numel
    slot = chunk_bytes(needs.state_format, numel, compresses=limits.flows.compressed) + numel * of_param
    most_bytes = ring_share_bytes(limits.flows.state_ring_bytes, needs.ranks)
    if needs.matrices:
        largest = max(needs.matrices)
        own = STATE_FORMATS[needs.state_format][0] + MOMENT_BYTES + of_param
        slot, chunks = max(slot, own * largest), chunks + len(needs.matrices)
        most_bytes = max(most_bytes, LEAST_MATRICES * slot)
    own = -(-chunks // needs.ranks)
    return needs.ranks * ring_of_states_bytes(slot, own, most_bytes, limits.flows.state_ring_slots)


def chunk_bytes(state_format: str, numel: int, *, compresses: bool, tails: int = 2) -> int:
    """Bytes of the states of a chunk of `numel` elements in a slot of the ring. `tails`: rooms for what compressed
    moments take beyond their planes: one is written while the other is read."""
    master, moments = STATE_FORMATS[state_format]
    if not compresses or moments < 2 * MOMENT_BYTES:
        return round_up(int(numel * (master + moments)), BLOCK_BYTES)
    own = int(numel * (master + COMPRESSED_MOMENTS)) + COMPRESSED_HEAD_BYTES
    return round_up(own, BLOCK_BYTES) + tails * COMPRESSION_ROOM * numel


def _pinned(limits: TrainingLimits, crossing_bytes: int, ranks: int) -> PinnedMemory:
    return limits.pins.of(crossing_bytes, ranks) if isinstance(limits.pins, Pins) else limits.pins


def cut_homes(
    needs: TrainingNeeds, ram_bytes: int | None, grain_numel: int, whole: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """Bytes of each part (of `needs.parts`) in RAM, from its beginning, at most `ram_bytes` in all (None: all of them).

    Embedding and head come first, then every layer has the same. `whole`: numbers of parts that must live in RAM. They,
    and what a mostly frozen part trains, may exceed the budget."""
    homes = [part.home_bytes for part in needs.parts]
    if ram_bytes is None:
        return tuple(homes)
    num_layers, e = len(needs.layers), needs.element_bytes
    cuts = [_least(part, e) for part in needs.parts]
    for number in whole:
        cuts[number] = homes[number]
    left = ram_bytes - sum(cuts)

    def extend(number: int, budget_bytes: int) -> None:
        nonlocal left
        cut, reach = cuts[number], cuts[number] + max(0, budget_bytes)
        grain_bytes = grain_numel * e
        new = homes[number] if reach >= homes[number] else max(cut, reach // grain_bytes * grain_bytes)
        cuts[number] = new
        left -= new - cut

    for number in range(num_layers, len(homes)):
        extend(number, left)
    short = sorted(range(num_layers), key=lambda number: homes[number] - cuts[number])
    for place, number in enumerate(short):
        extend(number, left // (num_layers - place))
    for number in range(num_layers):  # what rounding to the grain left over
        extend(number, min(left, 2 * grain_numel * e - 1))
    return tuple(cuts)


def _least(part: PartNeeds, element_bytes: int) -> int:
    trained = element_bytes * part.trained
    return trained if 2 * trained < part.home_bytes else 0
