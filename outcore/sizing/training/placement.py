"""Placement: where everything of a training run lives, who stays on the device and which updates begin early, and the
room that it is decided for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from outcore.common.quantities import format_gib, round_up
from outcore.sizing.layouts import Residency
from outcore.sizing.ring import BLOCK_BYTES
from outcore.sizing.states import STATE_FORMATS
from outcore.sizing.streaming import (
    CHUNK_NUMEL,
    NUM_SLOTS,
    PAGEABLE_SLOTS,
    SLOT_BYTES,
    WEIGHT_READ_AHEAD_BYTES,
    PinnedMemory,
    pinned_memory,
    waits_from,
)
from outcore.sizing.tiles import HELD_WHOLE, Holding
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
        """Make the pinned memory where so many bytes of homes cross to the device."""
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
    """Memory that may be pinned, or that was decided."""
    checkpoints_in_ram: bool = True
    """Whether activation checkpoints wait in RAM."""
    states_may_spill: bool = False
    weights_may_spill: bool = False
    holding: Holding = HELD_WHOLE
    """Way in which the device holds parts. Gradients of layers in tiles come while their checkpoints are still needed;
    rows of an embedding in tiles are picked in RAM, where its parameters stay."""
    chunk_numel: int = CHUNK_NUMEL
    """Elements of a chunk of states; parameters are cut between two of them."""
    gradient_bytes: int | None = None
    """RAM that all gradients share. None: each part's has a home of its own."""
    waits_for_norm: bool = True
    """Whether all gradients must be there before the first is used."""
    long_rows: int | None = None
    """RAM of a rank's long rows, in which activation checkpoints lie, too. None: rows are whole."""
    told: Residency | None = None
    """Earlier decision on what of parameters and states lives in RAM; None: it follows from `ram_bytes`."""
    read_ahead_bytes: int = WEIGHT_READ_AHEAD_BYTES

    @property
    def flows(self) -> Residency:
        """Flow of states from the drive."""
        return self.told or Residency()


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
    stored_chunk: int
    """Room for a chunk's states on the drive."""
    holding: Holding
    """Way in which the device holds parts."""
    waits_for_norm: bool
    """Whether updates wait for the global norm."""
    stays: int = 0
    """First layers that stay on the device, with gradients and states."""
    stay_bytes: int = 0
    """Bytes that layers which stay take on the device."""
    ahead: tuple[int, ...] = ()
    """Parts (of `needs.parts`) whose updates may begin before the norm is known: their states have a second home."""

    @property
    def tiled(self) -> frozenset[int]:
        """Layers in tiles, counted from 0."""
        return tiled_parts(self.needs, self.holding) & frozenset(range(len(self.needs.layers)))

    @property
    def weights(self) -> int:
        """Parameters in RAM."""
        return sum(self.cuts)

    def lines(self) -> list[str]:
        """Lines for people: what waits in RAM besides parameters and states; [] where nothing is worth a line."""
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

    def because(self) -> list[str]:
        """Reasons for what is not where it would be best, for people."""
        found = []
        if self.on_drive:
            then = "states, then parameters" if self.states_first else "parameters, then states"
            found.append(f"RAM has {format_gib(self.fixed)} of what has no other home first, then {then}")
        if self.why_none_stays:
            found.append(f"no layer stays on the device: {self.why_none_stays}")
        if self.waits_for_norm and self.why_all_wait:
            found.append(f"every update waits for the norm of all gradients: {self.why_all_wait}")
        return found

    @property
    def states_first(self) -> bool:
        """Whether states come into RAM before parameters: most of the model is frozen, and its base is only read."""
        return 2 * self.needs.gradients < self.needs.weights

    @cached_property
    def why_none_stays(self) -> str:
        """Why no layer can stay on the device; '' where idle memory decides."""
        why = {
            "parts are computed in tiles": self.holding.tiled,
            "rows are computed in tiles of tokens": self.holding.tile_tokens,
            "states and parameters on a drive are updated on their way": self.on_drive,
            "Muon updates matrices": self.needs.muon_params,
            "ranks share gradients": self.needs.ranks > 1,
            "states with 8-bit moments are updated on the CPU": STATE_FORMATS[self.needs.state_format][1] < 8,
        }
        return next((words for words, applies in why.items() if applies), "")

    @cached_property
    def why_all_wait(self) -> str:
        """Why no update can begin before the norm is known: none waits for it, or none could be taken back; ''
        where some can."""
        why = {
            "no update waits for a norm without clipping": not self.waits_for_norm,
            "Muon's updates are made in place": self.needs.muon_params,
            "states of several ranks are updated in place": self.needs.ranks > 1,
            "states on the drive are updated on their way": self.on_drive,
        }
        return next((words for words, applies in why.items() if applies), "")

    def staying(self, idle_bytes: int, hidden_bytes: int) -> TrainingPlacement:
        """Make the placement with as many first layers on the device as `idle_bytes` there hold. `hidden_bytes`: of a
        micro-batch's hidden states, which graphs keep two of."""
        layers = () if self.why_none_stays else range(len(self.needs.layers))
        totals = accumulate(self.resident_bytes(number, hidden_bytes) for number in layers)
        fitting = [total for total in totals if total <= idle_bytes]
        return replace(self, stays=len(fitting), stay_bytes=max(fitting, default=0))

    def resident_bytes(self, number: int, hidden_bytes: int) -> int:
        """Bytes of a layer that stays."""
        needs, layer = self.needs, self.needs.layers[number]
        gradient = needs.gradient_bytes(layer) if self.waits_for_norm else 0
        states = int(sum(STATE_FORMATS[needs.state_format]) * layer.trained)
        return layer.home_bytes + gradient + states + 2 * hidden_bytes

    def beginning_ahead(self, limit_bytes: int) -> TrainingPlacement:
        """Make the placement with as many updates ahead of the norm as `limit_bytes` of RAM hold second homes for: of
        the last parts, whose gradients come first, all but the embedding and layers that stay."""
        layers, parts = len(self.needs.layers), self.needs.parts
        last_first = (*range(layers + 1, len(parts)), *reversed(range(self.stays, layers)))
        trained = [number for number in last_first if parts[number].trained and not self.why_all_wait]
        totals = accumulate(map(self.second_bytes, trained))
        fitting = sum(total <= limit_bytes for total in totals)
        return replace(self, ahead=tuple(trained[:fitting]))

    def second_bytes(self, number: int) -> int:
        """RAM of a part's second home: its states, and what its parameters were."""
        needs = self.needs
        return int((needs.element_bytes + sum(STATE_FORMATS[needs.state_format])) * needs.parts[number].trained)

    @property
    def ahead_bytes(self) -> int:
        """RAM of all second homes."""
        return sum(map(self.second_bytes, self.ahead))

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
        """Bytes of parameters and states on the drive, with what it keeps free for compressed moments."""
        spilled = self.spilled_states / sum(STATE_FORMATS[self.needs.state_format])  # elements
        return self.spilled_weights + int(spilled * self.stored_chunk / CHUNK_NUMEL)

    @property
    def fixed(self) -> int:
        """Bytes that cannot leave RAM."""
        return self.gradients + self.beyond + self.rank_slots

    @property
    def homes(self) -> int:
        """Bytes that live in RAM."""
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
        """Bytes of it that ranks have in common."""
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


def tiled_parts(needs: TrainingNeeds, holding: Holding) -> frozenset[int]:
    """Parts (of `needs.parts`) in tiles; a holding counts them in the model's order, from the embedding on."""
    layers = len(needs.layers)
    in_order = (layers, *range(layers), *range(layers + 1, len(needs.parts)))
    return frozenset(number for index, number in enumerate(in_order) if index in holding.tiled)
