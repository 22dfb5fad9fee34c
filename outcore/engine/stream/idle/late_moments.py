"""Updates in two halves where the forward waits for the optimizer: weights before it, moments under the backward after.

With exact clipping no update can begin before the global norm is known, and the next forward waits for each part's.
DRAM limits both, while the backward leaves it idle. An update of fp32 moments moves 28 bytes a parameter; its first
half (read all, write master and weights, keep no moment) 20, the second (gradient and moments) 18. Both read the same
gradient and the same old moments, so the bits are those of one update. Until its second half is over a part's gradient
stays where it is: its home is not lent to activation checkpoints, and the next gradient waits for it.

How many parts, from the first one on, is found by trying: one more (at first an eighth) after a step whose forward
waited for updates, one fewer after a step whose backward waited for moments, then a rest of `REST_STEPS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outcore.engine.stream.blueprint import Blueprint
from outcore.engine.stream.idle.residents import Residents
from outcore.flow.parts import Part
from outcore.flow.trace import Stalls, elapsed_s, moment
from outcore.optim import AdamWHyper, JobBatch, OptimizerPool, Ticket, updates_on_device

WAITS = 0.02
"""Share of a pass's seconds that is worth a change."""
REST_STEPS = 16
LAST = 1 << 40
"""Priority behind all that a forward waits for."""


class LateMoments:
    """`candidates`: parts in the order in which a forward needs them; `stays`: whether a part is on the device, which
    updates it itself. `number` of parts; None: as many as help."""

    def __init__(
        self,
        candidates: Sequence[Part],
        pool: OptimizerPool,
        stalls: Stalls,
        device: torch.device,
        stays: Callable[[Part], bool],
        number: int | None,
        timeout_s: float,
    ) -> None:
        self._candidates, self._pool, self._stalls, self._device = list(candidates), pool, stalls, device
        self._stays, self._finds, self._timeout_s = stays, number is None, timeout_s
        self.count = 0 if number is None else number
        self._parts: frozenset[int] = frozenset()
        self._tickets: dict[int, Ticket] = {}
        self._waits: list[tuple[object, object]] = []
        self._rest_steps = 0
        self._has_turned = False

    def takes(self, part: Part) -> bool:
        """Whether the part's update of this step is made in halves, or that of the step before was until its backward
        in this one."""
        return part.index in self._parts

    def weights_done(self, part: Part, jobs: JobBatch, hyper: AdamWHyper) -> None:
        """Queue the second half: the part whose gradient comes first in a backward goes first."""
        self._tickets[part.index] = self._pool.submit(part.name, LAST - part.index, jobs, hyper, half="moments")

    def settle(self, part: Part) -> None:
        """Wait until the part's gradient in RAM is used up. UpdateFailed, TimeoutError."""
        ticket = self._tickets.pop(part.index, None)
        if ticket is None or self._pool.done(ticket):
            return
        begin = moment(self._device)
        with self._stalls.until(f"moments of {part.name}", "optimizer"):
            self._pool.wait(ticket, self._timeout_s)
        self._waits.append((begin, moment(self._device)))

    def drain(self) -> None:
        """Until every moment is up to date. UpdateFailed, TimeoutError."""
        while self._tickets:
            self._pool.wait(self._tickets.pop(min(self._tickets)), self._timeout_s)

    def step_ends(self, phase_s: dict[str, float]) -> None:
        """Choose the parts whose next update is made in halves, from the seconds of a step whose work is over: forward,
        backward and stall_optimizer."""
        late_s = sum(elapsed_s(begin, end) for begin, end in self._waits)
        self._waits = []
        self._rest_steps = max(0, self._rest_steps - 1)
        open_to = [part for part in self._candidates if not self._stays(part)]
        if self._finds and late_s > WAITS * phase_s["backward"]:
            self.count, self._rest_steps, self._has_turned = max(0, self.count - 1), REST_STEPS, True
        elif self._finds and not self._rest_steps and phase_s["stall_optimizer"] - late_s > WAITS * phase_s["forward"]:
            self.count += 1 if self._has_turned else max(1, len(open_to) // 8)
        self.count = min(self.count, len(open_to)) if self._finds else self.count
        self._parts = frozenset(part.index for part in open_to[: self.count])

    def words(self) -> str:
        """For people; '' where every update is made at once."""
        return f"moments of {len(self._parts)} parts under the backward" if self._parts else ""


def halved_parts(plan: Blueprint) -> list[Part]:
    """Parts whose updates may be made in halves: where they wait for the norm and AdamW's moments are fp32, with no
    tiles, other ranks or anything on a drive."""
    settings, units = plan.settings, plan.units
    fits_none = (
        not plan.is_deferred
        or settings.optimizer == "muon"
        or settings.late_moments == 0
        or not updates_on_device(plan.states)
        or plan.tile_plan.tiled
        or not plan.place.is_alone
        or plan.has_any_on_nvme
    )
    return [] if fits_none else [part for part in (units.embed, *units.layer_units) if part.is_trainable]


def open_late_moments(
    plan: Blueprint, pool: OptimizerPool, stalls: Stalls, residents: Residents, timeout_s: float
) -> LateMoments:
    """Late moments of an engine that is being built."""
    return LateMoments(
        halved_parts(plan),
        pool,
        stalls,
        plan.device,
        stays=lambda part: residents.slab(part) is not None,
        number=plan.settings.late_moments,
        timeout_s=timeout_s,
    )
