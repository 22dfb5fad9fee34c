"""Placement: where everything of a training run lives in RAM and on the drive, and the room that it is decided for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from outcore.common.quantities import format_gib, round_up
from outcore.sizing.ring import BLOCK_BYTES
from outcore.sizing.states import STATE_FORMATS
from outcore.sizing.streaming import (
    CHUNK_NUMEL,
    NUM_SLOTS,
    PAGEABLE_SLOTS,
    SLOT_BYTES,
    STATE_RING_BYTES,
    STATE_RING_SLOTS,
    WEIGHT_READ_AHEAD_BYTES,
    PinnedMemory,
    pinned_memory,
    waits_from,
)
from outcore.sizing.training.needs import TrainingNeeds


@dataclass(frozen=True)
class Pins:
    """Pinned memory that a run asks for."""

    asked_bytes: int
    may_pin_bytes: int = 0
    """Up to so much is pinned beyond it where homes need it."""
    slots: int = NUM_SLOTS
    slot_bytes: int = SLOT_BYTES
    most_slots: int = PAGEABLE_SLOTS
    pins_homes: bool = True
    """Whether homes are pinned; else lanes' slots alone."""

    def of(self, crossing_bytes: int, ranks: int) -> PinnedMemory:
        """What is pinned where so many bytes of homes cross to the device."""
        return pinned_memory(
            crossing_bytes if self.pins_homes else 0,
            self.asked_bytes,
            may_pin_bytes=self.may_pin_bytes,
            ranks=ranks,
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            most_slots=self.most_slots,
        )


@dataclass(frozen=True)
class TrainingLimits:
    """The room for a run's homes, and what may be done with them."""

    ram_bytes: int
    """RAM for homes and for what flows; processes and reserves are beside it."""
    pins: Pins | PinnedMemory
    """What may be pinned, or what was decided."""
    counts_lanes: bool = True
    """Whether lanes' slots are of `ram_bytes`."""
    checkpoints_in_ram: bool = True
    """Whether activation checkpoints wait in RAM."""
    states_may_spill: bool = False
    weights_may_spill: bool = False
    whole: frozenset[int] = frozenset()
    """Parts, by their number in `needs.parts`, whose parameters stay in RAM: rows of an embedding in tiles are picked
    there."""
    chunk_numel: int = CHUNK_NUMEL
    """Elements of a chunk of states; parameters are cut between two of them."""
    gradient_bytes: int | None = None
    """RAM that all gradients share. None: each part's has a home of its own."""
    waits_for_norm: bool = True
    """Whether all gradients must be there before the first is used."""
    tiled: frozenset[int] = frozenset()
    """Layers in tiles, counted from 0: their gradients come while their checkpoints are still needed."""
    long_rows: int | None = None
    """RAM of a rank's long rows, in which activation checkpoints lie, too. None: rows are whole."""
    is_told: bool = False
    """Whether the next two were decided before; otherwise they follow from `ram_bytes`."""
    state_ram_bytes: int | None = None
    """States in RAM; None: all."""
    weight_ram_bytes: int | None = None
    """Parameters in RAM, likewise."""
    ring_bytes: int = STATE_RING_BYTES
    ring_slots: int = STATE_RING_SLOTS
    compresses: bool = True
    """Whether fp32 moments take fewer bits on the drive."""
    read_ahead_bytes: int = WEIGHT_READ_AHEAD_BYTES


@dataclass(frozen=True)
class TrainingPlacement:
    """The answer, in bytes."""

    needs: TrainingNeeds
    weight_budget: int | None
    """RAM for parameters, which are cut between chunks. None: all of them."""
    cuts: tuple[int, ...]
    """Bytes of each part's parameters in RAM, from the beginning; the rest is on the drive."""
    states: int
    """Optimizer states in RAM, likewise."""
    gradients: int
    lent: tuple[int, ...]
    """Activation checkpoints of each layer that lie in its gradient's home, of one rank."""
    beyond: int
    """Activation checkpoints in RAM of their own, of all ranks; of long rows all of them."""
    rank_slots: int
    """Gradients of several ranks on their way into the sum."""
    ring: int
    """States on their way from the drive and back."""
    read_ahead: int
    """Parameters on their way from the drive."""
    pinned: PinnedMemory
    has_homes: bool
    """Whether each part's gradient has a home of its own; else they share memory."""
    tiled: frozenset[int]
    """Layers in tiles."""
    stored_chunk: int
    """Room for a chunk's states on the drive."""

    @property
    def weights(self) -> int:
        """Parameters in RAM."""
        return sum(self.cuts)

    def lines(self) -> list[str]:
        """What waits in RAM beside parameters and states, for people; [] where nothing is worth a line."""
        found, lent = [], self.needs.ranks * sum(self.lent)
        if self.beyond:
            beside = f"{format_gib(lent)} of activation checkpoints lie in the homes of gradients, " if lent else ""
            found.append(f"RAM: {beside}{format_gib(self.beyond)} of activation checkpoints have RAM of their own")
        if not self.has_homes:
            found.append(
                f"RAM: gradients share {format_gib(self.gradients)}, as there is no room for a home of each: an update "
                "may have to end before the next gradient comes"
            )
        return found

    @property
    def spilled_weights(self) -> int:
        """Parameters on the drive."""
        return self.needs.weights - self.weights

    @property
    def spilled_states(self) -> int:
        """States on the drive, as they would be in RAM."""
        return self.needs.states - self.states

    @property
    def on_drive(self) -> int:
        """What the drive has of both, and keeps free for compressed moments."""
        spilled = self.spilled_states / sum(STATE_FORMATS[self.needs.state_format])  # elements
        return self.spilled_weights + int(spilled * self.stored_chunk / CHUNK_NUMEL)

    @property
    def fixed(self) -> int:
        """What cannot leave RAM."""
        return self.gradients + self.beyond + self.rank_slots

    @property
    def homes(self) -> int:
        """All that lives in RAM."""
        return self.weights + self.states + self.fixed

    @property
    def flowing(self) -> int:
        """RAM through which the drive's share passes."""
        return self.ring + self.read_ahead

    @property
    def lanes(self) -> int:
        """Slots of all ranks' lanes."""
        return self.needs.ranks * self.pinned.lane_bytes

    @property
    def crossing(self) -> int:
        """Homes in RAM that cross to the device, each in whole blocks: parameters, gradients, states of the matrices
        that Muon updates, and what waits."""
        return self.shared + self.beyond

    @property
    def shared(self) -> int:
        """What ranks have in common of it."""
        needs = self.needs
        sizes = [round_up(needs.gradient_bytes(part), BLOCK_BYTES) for part in needs.parts]
        gradients = min(sum(sizes), round_up(self.gradients, BLOCK_BYTES)) if not self.has_homes else sum(sizes)
        muon = needs.matrix_states * self.states // max(1, needs.states)
        return sum(round_up(cut, BLOCK_BYTES) for cut in self.cuts) + gradients + muon + self.rank_slots

    @property
    def own_pinned(self) -> int:
        """Pinned memory of one rank's pool: no more than its lanes, homes and what flows can use. Of several ranks each
        has its lanes, and activation checkpoints as far as pinned memory reaches beyond what they share."""
        ranks, pool_bytes, lane_bytes = self.needs.ranks, *self.pinned
        if ranks == 1:
            return min(pool_bytes, lane_bytes + self.crossing + self.read_ahead)
        left = max(0, pool_bytes - ranks * lane_bytes - self.shared)
        return lane_bytes + min(self.beyond, left) // ranks

    @cached_property
    def waits(self) -> tuple[int, ...]:
        """First byte of each layer's parameters that waits where its gradient was, instead of being read from the drive
        (`streaming.waits_from`); its size where none does."""
        needs = self.needs
        return tuple(
            int(
                waits_from(
                    layer.home_bytes,
                    needs.gradient_bytes(layer),
                    self.cuts[number],
                    self.lent[number],
                    ranks=needs.ranks,
                    in_tiles=number in self.tiled,
                )
            )
            if self.has_homes
            else layer.home_bytes
            for number, layer in enumerate(needs.layers)
        )
