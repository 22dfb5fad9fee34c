"""Weights on the device just in time: slabs go up through a lane into a few buffers, ahead of the unit that needs them.

Layers share `num_layer_buffers` buffers of the largest layer's size; embedding and head share one of their own, because
a vocabulary is often larger than a layer. Copies are issued in order of need as soon as their buffer is free (an event
on the compute stream) and the unit's last update is over; a copy that would have to wait for the optimizer is left for
later, so that the host goes on launching work. Cost: buffers, and one upload per use that is not still there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from outcore.engine.stream.slots import SlotUse, plan_slots
from outcore.engine.stream.stalls import Stalls
from outcore.engine.stream.units import Unit, Units
from outcore.staging import AT_ONCE, LaneTransfer, UploadLane

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Where slabs come from."""

    def slab(self, unit: Unit) -> torch.Tensor:
        """The unit's parameters in RAM, 1-D."""
        ...

    def is_ready(self, unit: Unit) -> bool:
        """Whether the last update has been applied to the slab."""
        ...

    def wait_ready(self, unit: Unit) -> None:
        """Block until it has; raises what went wrong with it."""
        ...


class WeightPrefetcher:
    """See the module docstring. One pass at a time: `begin`, then `acquire` and `release` each use in turn.

    `skip`: indices of units that never come in whole (they are computed in tiles); no buffer has room for them.
    """

    def __init__(
        self,
        units: Units,
        source: WeightSource,
        lane: UploadLane,
        num_layer_buffers: int = 3,
        skip: frozenset[int] = frozenset(),
        *,
        stalls: Stalls | None = None,
    ) -> None:
        layers = [unit.layout.size_bytes for unit in units.layer_units if unit.index not in skip]
        layer_bytes = max(layers, default=0)
        ends_bytes = max((u.layout.size_bytes for u in (units.embed, units.head) if u.index not in skip), default=0)
        counts = [max(1, min(num_layer_buffers, len(layers))), 1]
        self._buffers = [
            [torch.zeros(size, dtype=torch.uint8, device=lane.device) for _ in range(count)]
            for size, count in zip([layer_bytes, ends_bytes], counts, strict=True)
        ]
        self._ends = {id(units.embed), id(units.head)}
        self._source, self._lane = source, lane
        self._over: dict[tuple[int, int], Any] = {}
        """Event after the last use of (kind, buffer)."""
        self._uses: list[tuple[Unit, int, SlotUse]] = []
        self._copies: list[int] = []
        self._arriving: dict[tuple[int, int], LaneTransfer] = {}
        self._released = -1
        self.stalls = stalls or Stalls(lane.device)

    @property
    def device_bytes(self) -> int:
        return sum(buffer.nbytes for kind in self._buffers for buffer in kind)

    def begin(self, sequence: Sequence[Unit]) -> None:
        """Plan a pass that uses these units in this order, and start the first uploads."""
        self._uses = []
        uses: dict[int, tuple[int, SlotUse]] = {}
        for kind in (0, 1):
            places = [at for at, unit in enumerate(sequence) if (id(unit) in self._ends) == bool(kind)]
            plan = plan_slots([id(sequence[at]) for at in places], len(self._buffers[kind]))
            for at, use in zip(places, plan, strict=True):
                free_after = places[use.free_after] if use.free_after >= 0 else -1
                uses[at] = (kind, SlotUse(use.buffer, use.copy, free_after))
        self._uses = [(unit, *uses[at]) for at, unit in enumerate(sequence)]
        self._copies = [at for at, (_, _, use) in enumerate(self._uses) if use.copy]
        self._arriving = {}
        self._released = -1
        self.stalls.begin()
        self._issue(needed=-1)

    def acquire(self, at: int) -> torch.Tensor:
        """The slab of use number `at` on the device; work queued on the current stream from now on may read it."""
        unit, kind, use = self._uses[at]
        with self.stalls.until(f"weights of {unit.name}", "pcie"):
            self._issue(needed=at)
            transfer = self._arriving.get((kind, use.buffer))
            if transfer is not None:
                transfer.wait_stream()
        return self._buffers[kind][use.buffer][: unit.layout.size_bytes].view(unit.layout.dtype)

    def release(self, at: int) -> None:
        """Everything that reads use `at` has been queued."""
        _, kind, use = self._uses[at]
        self._over[kind, use.buffer] = self._lane.streams.now()
        self._released = at
        self._issue(needed=-1)

    def abort(self) -> None:
        """After a failure in mid-pass: wait for uploads under way, so that no buffer is written to later."""
        self._copies = []
        for transfer in self._arriving.values():
            settle(transfer)
        self._arriving = {}

    def _issue(self, needed: int) -> None:
        while self._copies:
            at = self._copies[0]
            unit, kind, use = self._uses[at]
            if use.free_after > self._released:
                return
            if at > needed and not self._source.is_ready(unit):
                return
            self._source.wait_ready(unit)
            target = self._buffers[kind][use.buffer][: unit.layout.size_bytes]
            event = self._over.get((kind, use.buffer))
            self._arriving[kind, use.buffer] = self._lane.submit_host(
                self._source.slab(unit).view(torch.uint8),
                target,
                after=AT_ONCE if event is None else event,
                label=unit.name,
            )
            self._copies.pop(0)


def settle(transfer: LaneTransfer) -> None:
    """After a failure elsewhere: wait until this transfer has ended, well or badly; its own error is only logged."""
    try:
        transfer.wait()
    except (RuntimeError, OSError, TimeoutError) as error:
        logger.error("while another failure was handled: %s", error)
