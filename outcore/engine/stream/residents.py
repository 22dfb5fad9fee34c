"""Layers that stay on the device where memory is idle: weights, gradient and optimizer states, updated there.

They are copies: homes in RAM stay, and are written back before anybody reads them (`write_back`). How many stay is
decided after two steps of one size, from what is idle then and what those steps waited for (`sizing.training`). When a
larger step comes that would not fit beside them, all go home, and it is decided anew after that. Updates are queued
behind the backward pass on the stream that computes, so nothing waits for them, and results are those of the CPU's
optimizer, bit by bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.common.quantities import format_gib
from outcore.engine.stream.blueprint import Blueprint, work_of_step
from outcore.engine.stream.gradients.download import GradAccumulator, GradientDownload, ShippingBefore, TransferGroup
from outcore.flow.parts import Part
from outcore.flow.tiles import free_device_bytes
from outcore.optim import LARGEST_GRAD, AdamWHyper, ChunkJob, update_on_device, updates_on_device
from outcore.sizing.streaming import LEAST_GAIN, OTHERS_BYTES, DeviceUse, gain_of_staying
from outcore.sizing.training import TrainingPlacement
from outcore.states import Homes

logger = logging.getLogger(__name__)

STEPS_BEFORE = 2
"""Steps of one size before it is decided: the first one compiles and captures."""


@dataclass
class Resident:
    """One layer on the device."""

    slab: torch.Tensor
    """uint8, the bytes of the part's home."""
    states: torch.Tensor | None
    """One uint8 tensor with the states of all its chunks, so that one kernel updates them; None: nothing is trained."""
    gradient: torch.Tensor | None
    """Waits for the global norm; None without updates of their own, and where they come at once."""
    arrived: torch.Tensor | None = None
    """The step's rounded gradient, kept until the update."""
    norm: torch.Tensor | None = None
    is_ahead: bool = False
    """Whether it was updated since it was last written back."""


class Residents:
    """Layers on the device. `candidates`: parts that may stay, first needed first; `limit_bytes`: for all of them, None
    for what is idle, where the forecast gains; `device_bytes`: memory that the engine was told to plan for, if any;
    `evaluation_bytes`: what an evaluation takes of the device, as far as it is known."""

    def __init__(
        self,
        candidates: Sequence[Part],
        homes: Homes,
        device: torch.device,
        placed: TrainingPlacement,
        *,
        limit_bytes: int | None,
        device_bytes: int | None,
        hidden_row_bytes: int,
        evaluation_bytes: int,
    ) -> None:
        self._candidates, self._homes, self._device = list(candidates), homes, device
        self._placed, self._limit_bytes = placed, limit_bytes
        self._hidden_row_bytes, self._evaluation_bytes = hidden_row_bytes, evaluation_bytes
        self._held: dict[int, Resident] = {}
        self._parts: list[Part] = []
        self._largest = (0, 0)
        self._steps = 0
        self._moving_bytes = 0
        self.measure: Callable[[], DeviceUse] = lambda: measured_use(device, device_bytes)

    @property
    def device_bytes(self) -> int:
        held = self._held.values()
        gradients = sum(one.gradient.nbytes for one in held if one.gradient is not None)
        states = sum(one.states.nbytes for one in held if one.states is not None)
        return gradients + states + sum(one.slab.nbytes for one in held)

    @property
    def num_held(self) -> int:
        """Layers on the device."""
        return len(self._parts)

    def words(self) -> str:
        """Text for people: what stays, or may; '' when nothing will."""
        if self._parts:
            return (
                f"{self._parts[0].name} to {self._parts[-1].name} stay on the device, {format_gib(self.device_bytes)}"
            )
        if not self._candidates or self._limit_bytes == 0:
            return ""
        most = f"take up to {format_gib(self._limit_bytes or 0)} of the device"
        if self._limit_bytes is None:
            most = "stay on the device, as far as memory is idle and steps wait for updates or uploads"
        return f"after {STEPS_BEFORE} steps the first layers {most} (--resident_gib 0: none does)"

    def slab(self, part: Part) -> torch.Tensor | None:
        """uint8: the bytes of the part's home where it stays on the device, up to date for work queued from now on."""
        held = self._held.get(part.index)
        return None if held is None else held.slab

    def arrive(self, part: Part, rounded: torch.Tensor, norm: torch.Tensor) -> bool:
        """Take the part's complete gradient; False where it does not stay. Without clipping `rounded` is read by the
        update, which must be queued before it is written to again."""
        held = self._held.get(part.index)
        if held is None:
            return False
        held.arrived, held.norm = rounded, norm
        if held.gradient is not None:
            held.arrived = held.gradient.copy_(rounded)
        return True

    def update(self, part: Part, hyper: AdamWHyper, *, guard: bool) -> bool:
        """Queue the part's update with the gradient that arrived; False where it does not stay. `guard`: leave the
        states alone if the gradient is not usable, which the step's norm then says."""
        held = self._held.get(part.index)
        if held is None:
            return False
        assert held.states is not None and held.arrived is not None and held.norm is not None
        usable = torch.ones(1, dtype=torch.bool, device=self._device)
        if guard:
            usable = (held.norm.double() * hyper.grad_scale <= LARGEST_GRAD).view(1)
        param = held.slab.view(part.layout.dtype)[: len(held.arrived)]
        chunks = self._homes[part].chunks
        undecayed = tuple((c.start + start, c.start + stop) for c in chunks for start, stop in c.undecayed)
        job = ChunkJob(held.arrived, held.states, param, chunks[0].element_offset, undecayed)
        update_on_device(self._homes.state_format, job, hyper, usable)
        held.arrived, held.is_ahead = None, True
        return True

    def write_back(self) -> None:
        """Bring the homes in RAM up to date."""
        for part in self._parts:
            held = self._held[part.index]
            if held.is_ahead:
                ram, numel = self._homes[part].slab, part.layout.trainable_numel
                ram[:numel].copy_(held.slab.view(part.layout.dtype)[:numel])
                for at_home, here in self._pieces(part, held):
                    at_home.copy_(here)
                held.is_ahead = False

    def forget(self) -> None:
        """The homes were written to: what is here is out of date. Layers come again after the next steps."""
        self._held, self._parts, self._steps = {}, [], 0

    def give_way(self, why: str) -> bool:
        """Give all memory back; one layer less comes again. False when there is none."""
        one_less = len(self._parts) - 1
        if gave := self.go_home(why):
            del self._candidates[one_less:]  # beside as many memory would be short again
        return gave

    def go_home(self, why: str) -> bool:
        """Have no layer stay; False when none does."""
        if not self._held:
            return False
        logger.warning(
            "%d layers go from the GPU back to RAM (%s): %s", len(self._parts), format_gib(self.device_bytes), why
        )
        self.write_back()
        self.forget()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return True

    def step_begins(self, tokens: Sequence[int]) -> None:
        """Make room before a step of micro-batches of these `tokens`, if it is larger than any before."""
        size = (max(tokens), sum(tokens))
        if size[0] <= self._largest[0] and size[1] <= self._largest[1]:
            self._steps += 1
            return
        growth = max(new / old for new, old in zip(size, self._largest, strict=True)) if self._held else 1.0
        self._moving_bytes = int(growth * self._moving_bytes)
        if self._held and self._use().idle < 0:
            self.go_home(f"a step of {size[1]} tokens, up to {size[0]} at a time, needs more memory than any before")
        self._largest = (max(size[0], self._largest[0]), max(size[1], self._largest[1]))
        self._steps = 1

    def step_ended(self, settle: Callable[[], None], phase_s: dict[str, float]) -> str:
        """After a step: decide, once there were enough of one size; what was decided for people, '' when nothing was.
        `settle` waits for updates under way; `phase_s` as in `StepResult`."""
        if self._steps != STEPS_BEFORE or not self._candidates or self._limit_bytes == 0 or self._held:
            return ""
        self._moving_bytes = self._evaluation_bytes
        count, said = self._choose(self._use().idle, phase_s)
        if count:
            settle()
            said = self._take(self._candidates[:count], said)
        return said

    def _choose(self, idle_bytes: int, phase_s: dict[str, float]) -> tuple[int, str]:
        """(number of layers to pin, reason for that number in words)."""
        may_take = idle_bytes if self._limit_bytes is None else min(idle_bytes, self._limit_bytes)
        hidden_bytes, none = self._largest[0] * self._hidden_row_bytes, "no layer stays on the device"
        count = min(self._placed.staying(may_take, hidden_bytes).stays, len(self._candidates))
        if not count:
            one_bytes = self._placed.resident_bytes(0, hidden_bytes)
            return 0, f"{none}: one takes {format_gib(one_bytes)}, and {format_gib(max(0, may_take))} may be used"
        if self._limit_bytes is not None:
            return count, ""
        gain = self._gain_of(count, phase_s)
        if gain < LEAST_GAIN:
            return 0, f"{none}: {count} could, and would spare {100 * gain:.0f} % of a step"
        return count, f", which spares {100 * gain:.0f} % of a step by forecast (--resident_gib 0: none does)"

    def _gain_of(self, count: int, phase_s: dict[str, float]) -> float:
        needs = self._placed.needs
        share = sum(layer.trained for layer in needs.layers[:count]) / max(1, needs.trained)
        passes_s = phase_s["forward"] + phase_s["backward"]
        bound_s = phase_s["forward"] if self._placed.waits_for_norm else passes_s
        waits_s = phase_s["stall_optimizer"] + phase_s["stall_pcie"]
        return gain_of_staying(share, waits_s, bound_s, passes_s + phase_s["optimizer"])

    def _use(self) -> DeviceUse:
        now = self.measure()
        self._moving_bytes = max(now.moving, self._moving_bytes)
        return DeviceUse(now.limit, now.reserved, self._moving_bytes)

    def _take(self, parts: Sequence[Part], why: str) -> str:
        """Copy them up, as far as there is memory; every update is over. What came of it, with why, in words."""
        for part in parts:
            try:
                self._held[part.index] = self._copied_up(part)
            except torch.OutOfMemoryError:  # another program has taken it meanwhile
                why = f"; {part.name} and those behind it do not: memory was short"
                break
            self._parts.append(part)
        return (self.words() if self._parts else "no layer stays on the device") + why

    def _copied_up(self, part: Part) -> Resident:
        home, numel = self._homes[part], part.layout.trainable_numel
        held = Resident(home.slab.view(torch.uint8).to(self._device, copy=True), None, None)
        if not numel:
            return held
        size_bytes = self._homes.state_format.chunk_bytes(numel)
        held.states = torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)
        for at_home, here in self._pieces(part, held):
            here.copy_(at_home)
        if self._placed.waits_for_norm:
            held.gradient = torch.zeros(numel, dtype=part.layout.dtype, device=self._device)
        return held

    def _pieces(self, part: Part, held: Resident) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(bytes of a state in RAM, the same bytes on the device), for each state of each chunk."""
        numel, regions = part.layout.trainable_numel, self._homes.state_format.regions
        for chunk in self._homes[part].chunks:
            assert chunk.buffer is not None and held.states is not None
            for own, whole in zip(regions(chunk.numel).values(), regions(numel).values(), strict=True):
                begin = whole.offset_bytes + chunk.start * whole.dtype.itemsize
                at_home = chunk.buffer[own.offset_bytes : own.offset_bytes + own.size_bytes]
                yield at_home, held.states[begin : begin + own.size_bytes]


def open_residents(plan: Blueprint, homes: Homes) -> Residents:
    """The residents of an engine that is being built: none where it has tiles, other ranks or anything on a drive."""
    settings, device = plan.settings, plan.device
    largest = max(part.layout.trainable_numel for part in plan.units.layer_units)
    # Chunks are of whole blocks, so one may flow though the placement, which counts elements, has room for all.
    flows = any(map(homes.flowing, plan.units.all))
    fits_none = plan.placed.why_none_stays or flows or not updates_on_device(plan.states, largest)
    work = work_of_step(plan.loaded, settings, device, plan.tile_plan.tile_bytes, 0, compiled=True)
    return Residents(
        [] if fits_none else plan.units.layer_units,
        homes,
        device,
        plan.placed,
        limit_bytes=settings.resident_bytes if device.type == "cuda" else settings.resident_bytes or 0,
        device_bytes=settings.device_bytes,
        hidden_row_bytes=plan.loaded.facts.hidden_size * plan.dtype.itemsize,
        evaluation_bytes=0 if work is None else work.evaluation,
    )


class ResidentDownload(ShippingBefore):
    """`GradientShipping` of a model with pinned layers, whose gradients stay on the device as well."""

    def __init__(self, inner: GradientDownload, residents: Residents) -> None:
        super().__init__(inner)
        self._rounded, self._residents = inner.rounded, residents

    def ship(self, unit: Part, accumulator: GradAccumulator) -> Any:
        if self._residents.slab(unit) is None:
            return super().ship(unit, accumulator)
        self._residents.arrive(unit, *self._rounded(unit, accumulator.complete()))
        return TransferGroup([])


def measured_use(device: torch.device, device_bytes: int | None) -> DeviceUse:
    """Bytes of the device that are used between two steps, after its allocator gave back what it can; `moving` since
    its peak was last reset. `device_bytes`: all that may be used, if that is told."""
    if device.type != "cuda":
        return DeviceUse(1 << 62, 0, 0)
    peak, held = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    free = free_device_bytes(device, OTHERS_BYTES)
    assert free is not None
    limit = free + held if device_bytes is None else min(free + held, device_bytes)
    return DeviceUse(limit, torch.cuda.memory_reserved(device), max(0, peak - held))
