"""The device helps with updates: what the CPU has not begun goes over the idle link and back, the last part first.

Updates that wait for the global norm run under the next forward pass, in the order in which it needs the parts, and the
link has little to do meanwhile. So from the other end parts are taken back from the CPU's queue, one by one: gradient,
states and parameter come up in chunks, are updated there with the bits of the CPU's kernels, and go home, until both
meet. Who updates what does not change results.

Whether that is faster depends on the machine: where the CPU alone already takes all that its memory gives, nothing is
won. So it is tried, once it is decided what stays on the device: some steps without, as many with.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from outcore.engine.stream.blueprint import Blueprint
from outcore.engine.stream.gradients.arena import GradientArena
from outcore.flow.parts import Part
from outcore.optim import AdamWHyper, HomeJob, JobBatch, OptimizerPool, Ticket, UpdatesFromHome, updates_on_device
from outcore.staging.pool import HostMemory, PinRefused
from outcore.states import Homes

logger = logging.getLogger(__name__)

NUM_SLOTS = 4
"""Chunks on the device at a time: one comes, one is updated, one goes, one waits."""
MOST_PERCENT = 50
"""Part of the trained parameters that may be updated here: their states are pinned for it."""
LEAST_GAIN = 0.02
"""Share of a step that updates must be waited for to try it, and that it must spare to stay."""
TIMED_STEPS = 2
"""On each side, after one that makes what is new; the faster one counts."""


class Waiting(Protocol):
    """An update that is handed over and waits for its turn."""

    unit: Part
    ticket: Ticket | None
    jobs: JobBatch | None
    helped: Future[None] | None


@dataclass
class _Trial:
    """Seconds a token of the steps that count."""

    without: float | None = None
    """The faster one of those without help; None: they are still being made."""
    seen: list[float] | None = None

    def best(self, step: float | None) -> float | None:
        """The faster of `TIMED_STEPS`, once there were so many; None begins anew."""
        seen, self.seen = self.seen, None
        if step is None:
            return None
        seen = [] if seen is None else [*seen, step]  # the first one does not count
        if len(seen) == TIMED_STEPS:
            return min(seen)
        self.seen = seen
        return None


class DeviceHelp:
    """`candidates`: the parts that may be updated here, first needed first; none: it never helps. `trained`: parameters
    of the whole model. `mode`: auto tries it, on does not ask whether it pays."""

    def __init__(
        self,
        candidates: Sequence[Part],
        homes: Homes,
        arena: GradientArena,
        memory: HostMemory,
        device: torch.device,
        *,
        trained: int,
        mode: Literal["auto", "on", "off"],
    ) -> None:
        self._candidates, self._homes, self._arena, self._memory = candidates, homes, arena, memory
        self._device, self._trained = device, max(1, trained)
        self._mode = mode if candidates else "off"
        numels = [chunk.numel for part in candidates for chunk in homes[part].chunks]
        element_bytes = candidates[0].dtype.itemsize if candidates else 0
        self._slot_bytes = max(
            (HomeJob.bytes_of(homes.state_format, numel, element_bytes) for numel in numels), default=0
        )
        self._trial = _Trial()
        self._parts: dict[int, Part] = {}
        self._pinned: list[torch.Tensor] = []
        self._updates: UpdatesFromHome | None = None
        self._turns = ThreadPoolExecutor(1, thread_name_prefix="device-help")
        self._turn: Future[None] | None = None
        self._is_closing = False

    @property
    def device_bytes(self) -> int:
        """What it takes there, or may take."""
        return 0 if self._mode == "off" or self._device.type == "cpu" else NUM_SLOTS * self._slot_bytes

    def words(self) -> str:
        """For people; '' where there is none."""
        if self._updates is None:
            return ""
        numel = sum(part.layout.trainable_numel for part in self._parts.values())
        return f"the device helps with those of the last {100 * numel // self._trained} % of the parameters"

    def share(self, waiting: Sequence[Waiting], pool: OptimizerPool, hyper: AdamWHyper) -> None:
        """Take from the CPU what it does not get to of these updates, which are in order of need."""
        if self._mode == "on" and self._updates is None:
            self._open()
        if self._updates is None:
            return
        if self._turn is not None:
            self._turn.result()
        may = [one for one in waiting if one.unit.index in self._parts]
        self._turn = self._turns.submit(self._take, may, self._updates, pool, hyper)

    def _take(
        self, waiting: Sequence[Waiting], updates: UpdatesFromHome, pool: OptimizerPool, hyper: AdamWHyper
    ) -> None:
        before: Future[None] | None = None
        for one in reversed(waiting):
            assert one.ticket is not None and one.jobs is not None
            one.helped = Future()  # before the ticket says so: who waits for the unit looks there next
            if self._is_closing or not pool.withdraw(one.ticket):
                return
            updates.submit([HomeJob(self._homes.state_format, job) for job in one.jobs.jobs], hyper, one.helped)
            if before is not None:
                before.exception()  # one unit ahead is enough: the one after it may as well be the CPU's
            before = one.helped

    def step_ended(self, phase_s: Mapping[str, float], num_tokens: int, *, is_settled: bool) -> str:
        """After a step of so many tokens: try it, or end the trial; what came of it for people, '' most of the time.
        `is_settled`: what stays on the device has been decided."""
        trial = self._trial
        if self._mode != "auto":
            return ""
        step_s = phase_s["forward"] + phase_s["backward"] + phase_s["optimizer"]
        best = trial.best(step_s / num_tokens if is_settled else None)
        if best is None:
            return ""
        if trial.without is None:
            if phase_s["stall_optimizer"] < LEAST_GAIN * step_s:
                self._mode = "off"
                return ""
            trial.without = best
            return self._open()
        gain = 1 - best / trial.without
        if gain >= LEAST_GAIN:
            self._mode = "on"
            return f"{self.words()}, which spares {100 * gain:.0f} % of a step, as measured"
        self._shut()
        return "the device does not help with updates: steps were no faster with it"

    def _open(self) -> str:
        """Pin what is to cross the link and take memory on the device; '' or why not, which ends it."""
        left = self._trained * MOST_PERCENT // 100
        try:
            for part in reversed(self._candidates):
                left -= part.layout.trainable_numel
                if left < 0:
                    break
                if not self._cross_well(part):
                    continue
                for chunk in self._homes[part].chunks:
                    assert chunk.buffer is not None
                    if self._memory.pin(chunk.buffer):
                        self._pinned.append(chunk.buffer)
                self._parts[part.index] = part
            self._updates = UpdatesFromHome(self._device, self._slot_bytes, NUM_SLOTS)
            self._updates.open()
        except (PinRefused, torch.OutOfMemoryError) as error:
            self._shut()
            return f"the device does not help with updates: {error}"
        return ""

    def _cross_well(self, part: Part) -> bool:
        """Whether its gradient and parameters are pinned."""
        return self._device.type == "cpu" or (self._arena[part].is_pinned() and self._homes[part].slab.is_pinned())

    def give_way(self) -> bool:
        """Give memory back; False when it has none."""
        if self._updates is None or self._device.type == "cpu":
            return False
        logger.warning("the device does not help with updates any more: memory was short beside it")
        self._shut()
        return True

    def _shut(self) -> None:
        self._mode = "off"
        if self._turn is not None:
            self._turn.result()
        if self._updates is not None:
            self._updates.close()
        self._updates, self._parts = None, {}
        while self._pinned:
            self._memory.unpin(self._pinned.pop())
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """End after the update that is at work."""
        self._is_closing = True
        self._turns.shutdown(cancel_futures=True)
        if self._updates is not None:
            self._updates.close()


def open_device_help(plan: Blueprint, homes: Homes, arena: GradientArena, memory: HostMemory) -> DeviceHelp:
    """The help of an engine that is being built: none where updates do not wait for the norm, other ranks update too,
    or states or parameters live on a drive."""
    settings, device, parts = plan.settings, plan.device, plan.units.all
    trained = [part for part in parts if part.is_trainable]
    on_drive = plan.on_nvme or any(chunk.on_nvme for part in parts for chunk in plan.chunks[part.index])
    mode = settings.device_help if device.type == "cuda" or settings.device_help == "on" else "off"
    is_possible = (
        mode != "off"
        and plan.is_deferred
        and plan.place.is_alone
        and not on_drive
        and settings.optimizer != "muon"
        and updates_on_device(plan.states, settings.chunk_numel)
        and memory.can_pin_more(device)
    )
    return DeviceHelp(
        trained if is_possible else [],
        homes,
        arena,
        memory,
        device,
        trained=sum(part.layout.trainable_numel for part in trained),
        mode=mode,
    )
