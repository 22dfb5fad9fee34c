"""Weights on the device just in time: slabs go up through a lane into a few buffers, ahead of the unit that needs them.

Layers share `layer_buffers` buffers of the largest layer's size; embedding and head share one of their own, because
a vocabulary is often larger than a layer. Copies are issued in order of need as soon as their buffer is free (an event
on the compute stream) and the unit's last update is over; a copy that would have to wait for the optimizer is left for
later, so that the host goes on launching work. Cost: buffers, and one upload per use that is not still there.

Packed parts cross as they are stored and are expanded when they are acquired, into one buffer.

What lives on NVMe comes through a lane of its own, gated: its reads are submitted for the whole pass at once, in order
of need, and go ahead as far as that lane's slots reach; the gate of each opens when its device buffer is free. What of
it RAM has, too (`WeightSource.cached`), comes from there.

Which device buffer each use of a slab gets, and when it may be overwritten: planned before a pass begins.

A pass uses units in a known order (embedding, layers up, head, layers down). For each use the plan picks, among the
buffers that the last `num_buffers` - 1 uses did not touch, the one whose content is needed latest (Belady), so that
copies go ahead by that many uses and the turning point at the head copies nothing twice. Pure; cost O(uses x buffers).

Ranges of a unit's slab on their way up: from RAM, from NVMe, or a part from each.

Tiles are ranges of slabs. What of a slab lives on NVMe comes through a lane of its own: whole units' reads are queued
in another one long before their buffers are free, and a tile behind them would wait for a layer that waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outcore.common.deadline import Deadline
from outcore.common.errors import EngineError
from outcore.flow.parts import Part
from outcore.flow.trace import Stalls
from outcore.flow.weights.homes import Expansion, WeightSource
from outcore.sizing.tiles import HELD_WHOLE, Holding
from outcore.staging import AT_ONCE, Gate, LaneTransfer, UploadLane


@dataclass(frozen=True)
class SlotUse:
    """One use of a slab."""

    buffer: int
    copy: bool
    """Whether it must be uploaded; otherwise it is still there."""
    free_after: int
    """The copy may begin when this use (its place in the sequence) is over; -1: at once."""


def plan_slots(sequence: Sequence[Hashable], num_buffers: int) -> list[SlotUse]:
    """A buffer for each use of `sequence` (keys of slabs). ValueError without buffers."""
    if num_buffers < 1:
        raise ValueError(f"streaming needs at least one device buffer per kind of unit, got {num_buffers}")
    next_use = _next_uses(sequence)
    content: list[Hashable | None] = [None] * num_buffers
    last_use = [-1] * num_buffers
    plan: list[SlotUse] = []
    for at, key in enumerate(sequence):
        if key in content:
            buffer = content.index(key)
            plan.append(SlotUse(buffer, False, -1))
        else:
            recent = {use.buffer for use in plan[max(0, at - num_buffers + 1) : at]}
            free = [b for b in range(num_buffers) if b not in recent]

            def needed(b: int, at: int = at) -> int:
                return len(sequence) + 1 if content[b] is None else next_use(content[b], at)

            buffer = max(free, key=needed)
            plan.append(SlotUse(buffer, True, last_use[buffer]))
            content[buffer] = key
        last_use[buffer] = at
    return plan


def _next_uses(sequence: Sequence[Hashable]):
    places: dict[Hashable, list[int]] = {}
    for at, key in enumerate(sequence):
        places.setdefault(key, []).append(at)

    def next_use(key: Hashable, after: int) -> int:
        return next((at for at in places[key] if at >= after), len(sequence))

    return next_use


logger = logging.getLogger(__name__)

RESIDENT = -1
"""Stands for a kind of buffer: the part needs none."""


class PartsInOrder(Protocol):
    """A model as parts (`ModelParts`), or some of its layers, which have neither embedding nor head among them."""

    @property
    def all(self) -> Sequence[Part]: ...
    @property
    def layer_units(self) -> Sequence[Part]: ...
    @property
    def ends(self) -> Sequence[Part]: ...


class WeightPrefetcher:
    """The `WeightArrival` of parts that come in whole.

    `holding`: how many layers have buffers, and which units never come in whole (those in tiles): none has room for
    these.
    `drive_lane`: for what lives on NVMe; this prefetcher's alone. `resident`: the bytes of a part's home where they are
    on the device already, asked when a pass begins. `expansion`: shared with whoever keeps other parts, of which
    one is used at a time."""

    def __init__(
        self,
        units: PartsInOrder,
        source: WeightSource,
        lane: UploadLane,
        holding: Holding = HELD_WHOLE,
        *,
        stalls: Stalls | None = None,
        drive_lane: UploadLane | None = None,
        resident: Callable[[Part], torch.Tensor | None] = lambda part: None,
        expansion: Expansion | None = None,
    ) -> None:
        whole = {unit.index: unit for unit in units.all if unit.index not in holding.tiled}
        layers = [unit.layout.home_bytes for unit in units.layer_units if unit.index in whole]
        layer_bytes = max(layers, default=0)
        ends_bytes = max((u.layout.home_bytes for u in units.ends if u.index in whole), default=0)
        counts = [max(1, min(holding.layer_buffers, len(layers))), 1]
        self._buffers = [
            [torch.zeros(size, dtype=torch.uint8, device=lane.device) for _ in range(count)]
            for size, count in zip([layer_bytes, ends_bytes], counts, strict=True)
        ]
        self._expansion = Expansion(whole.values(), lane.device) if expansion is None else expansion
        self._ends = {id(unit) for unit in units.ends}
        self._source, self._lane, self._drive_lane, self._resident = source, lane, drive_lane, resident
        self._stays: dict[int, torch.Tensor] = {}
        """Uses of parts that are on the device for good."""
        self._over: dict[tuple[int, int], Any] = {}
        """Event after the last use of (kind, buffer). Empty until the first pass and after one that was aborted."""
        self._uses: list[tuple[Part, int, SlotUse]] = []
        self._copies: list[int] = []
        self._reads: list[int] = []
        """Uses with a part on NVMe that is not being read yet."""
        self._ahead: dict[int, tuple[Gate, LaneTransfer]] = {}
        """Reads under way whose gate is shut."""
        self._cached: dict[int, torch.Tensor] = {}
        """Ends of slabs that need not be read, by use."""
        self._arriving: dict[tuple[int, int], tuple[list[LaneTransfer], LaneTransfer | None]] = {}
        """Transfers by (kind, buffer): those from RAM and the one from NVMe."""
        self._released = -1
        self.stalls = stalls or Stalls(lane.device)

    @property
    def device_bytes(self) -> int:
        return self._expansion.device_bytes + sum(buffer.nbytes for kind in self._buffers for buffer in kind)

    def begin(self, sequence: Sequence[Part]) -> None:
        self._uses = []
        found = {at: self._resident(unit) for at, unit in enumerate(sequence)}
        self._stays = {at: home for at, home in found.items() if home is not None}
        uses: dict[int, tuple[int, SlotUse]] = dict.fromkeys(self._stays, (RESIDENT, SlotUse(0, False, -1)))
        for kind in (0, 1):
            places = [at for at, unit in enumerate(sequence) if (id(unit) in self._ends) == bool(kind)]
            places = [at for at in places if at not in self._stays]
            plan = plan_slots([id(sequence[at]) for at in places], len(self._buffers[kind]))
            for at, use in zip(places, plan, strict=True):
                free_after = places[use.free_after] if use.free_after >= 0 else -1
                uses[at] = (kind, SlotUse(use.buffer, use.copy, free_after))
        self._uses = [(unit, *uses[at]) for at, unit in enumerate(sequence)]
        self._copies = [at for at, (_, _, use) in enumerate(self._uses) if use.copy]
        self._reads = [at for at in self._copies if self._source.stored(self._uses[at][0]) is not None]
        assert not self._ahead, "the pass before was not ended: abort it"
        self._arriving, self._cached = {}, {}
        if not self._over:  # what is queued so far may use any buffer: their allocation, or a pass that was aborted
            now = self._lane.streams.now()
            self._over = {(kind, number): now for kind in (0, 1) for number in range(len(self._buffers[kind]))}
        self._released = -1
        self.stalls.begin()
        self._read_ahead()
        self._issue(needed=-1)

    def acquire(self, at: int) -> torch.Tensor:
        unit, kind, use = self._uses[at]
        if kind == RESIDENT:
            return self._expansion.slab(unit, self._stays[at])
        with self.stalls.until(f"weights of {unit.name}", "pcie"):
            self._issue(needed=at)
            from_ram, from_drive = self._arriving.get((kind, use.buffer), ([], None))
            for transfer in from_ram:
                transfer.wait_stream()
            if from_drive is not None:
                with self.stalls.because("nvme", f"weights of {unit.name} from NVMe"):
                    wait_for_drive(unit, from_drive)
        return self._expansion.slab(unit, self._target(at))

    def release(self, at: int) -> None:
        _, kind, use = self._uses[at]
        if kind != RESIDENT:
            self._over[kind, use.buffer] = self._lane.streams.now()
        self._released = at
        self._read_ahead()
        self._issue(needed=-1)

    def abort(self, deadline: Deadline | None = None) -> None:
        self._copies, self._reads = [], []
        for gate, _ in self._ahead.values():
            gate.cancel(_GivenUp("the pass that needed it was given up"))
        under_way = [transfer for _, transfer in self._ahead.values()]
        for from_ram, from_drive in self._arriving.values():
            under_way += from_ram if from_drive is None else [*from_ram, from_drive]
        settle(under_way, deadline or Deadline(self._lane.timeout_s))
        self._ahead, self._arriving, self._over = {}, {}, {}

    def _target(self, at: int) -> torch.Tensor:
        unit, kind, use = self._uses[at]
        return self._buffers[kind][use.buffer][: unit.layout.home_bytes]

    def _issue(self, needed: int) -> None:
        while self._copies:
            at = self._copies[0]
            unit, kind, use = self._uses[at]
            if use.free_after > self._released:
                return
            if at > needed and not self._source.is_current(unit):
                return
            self._source.wait_current(unit)
            self._read_ahead()
            event = self._over.get((kind, use.buffer))
            gate, from_drive = self._ahead.pop(at, (None, None))
            if gate is not None:
                gate.open(event)
            target, after = self._target(at), AT_ONCE if event is None else event
            slab, end = self._source.ram(unit).view(torch.uint8), self._cached.pop(at, None)
            pieces = [] if end is None else [(end, target[len(target) - len(end) :])]
            if len(slab) or (from_drive is None and end is None):
                pieces.append((slab, target[: len(slab)]))
            from_ram = [self._lane.submit_host(piece, out, after=after, label=unit.name) for piece, out in pieces]
            self._arriving[kind, use.buffer] = from_ram, from_drive
            self._copies.pop(0)

    def _read_ahead(self) -> None:
        """Submit reads from NVMe in order of need, up to the first unit that still waits for its update."""
        while self._reads and self._source.is_current(self._uses[self._reads[0]][0]):
            at = self._reads.pop(0)
            unit = self._uses[at][0]
            place = self._source.stored(unit)
            assert place is not None and self._drive_lane is not None
            store, name = place
            out, end = self._target(at)[len(self._source.ram(unit).view(torch.uint8)) :], self._source.cached(unit)
            if end is not None:
                end = self._cached[at] = end.view(torch.uint8)
                out = out[: len(out) - len(end)]
            if len(out):
                gate = Gate()
                transfer = self._drive_lane.submit_stored(store, name, out, after=gate, label=unit.name)
                self._ahead[at] = gate, transfer


def wait_for_drive(unit: Part, transfer: LaneTransfer) -> None:
    """Have the current stream wait for the transfer. EngineError for what could not be read."""
    try:
        transfer.wait_stream()
    except OSError as error:
        raise EngineError(
            f"the parameters of {unit.name} could not be read from NVMe: {error}. The run stops here (of a training: "
            "resume from the last checkpoint)"
        ) from error


class _GivenUp(RuntimeError):
    """A read that waited for its place, which nobody needs any more."""


def settle(transfers: Iterable[Any], deadline: Deadline | None = None) -> bool:
    """After a failure elsewhere: wait until these have ended, well or badly; their own errors are only logged.

    Without `deadline` as long as their lane's limit. False when one did not end: the others are then not waited for."""
    num_hanging = 0
    for transfer in transfers:
        try:
            transfer.wait(0.0 if num_hanging else deadline.left_s() if deadline is not None else None)
        except TimeoutError as error:
            num_hanging += 1
            if num_hanging == 1:
                logger.error("while another failure was handled: %s", error)
        except _GivenUp:  # that was asked for
            pass
        except (RuntimeError, OSError) as error:
            logger.error("while another failure was handled: %s", error)
    if num_hanging > 1:
        logger.error("while another failure was handled: %d more transfers have not ended", num_hanging - 1)
    return not num_hanging


class RangeUpload:
    """A range under way."""

    def __init__(self, unit: Part, from_ram: LaneTransfer | None, from_drive: LaneTransfer | None) -> None:
        self._unit, self._from_ram, self._from_drive = unit, from_ram, from_drive

    @property
    def is_from_drive(self) -> bool:
        return self._from_drive is not None

    def wait_stream(self) -> None:
        """Work queued on the current stream from now on waits for it. EngineError when it could not be read."""
        if self._from_ram is not None:
            self._from_ram.wait_stream()
        if self._from_drive is not None:
            wait_for_drive(self._unit, self._from_drive)

    def wait(self, timeout_s: float | None = None) -> int:
        """Blocks until it is there; the bytes moved."""
        transfers = [transfer for transfer in (self._from_ram, self._from_drive) if transfer is not None]
        return sum(transfer.wait(timeout_s) for transfer in transfers)


class SlabRanges:
    """Brings up ranges of slabs. `drive_lane` None: every slab it is asked for lives in RAM."""

    def __init__(self, source: WeightSource, lane: UploadLane, drive_lane: UploadLane | None = None) -> None:
        self.source, self.lane, self.drive_lane = source, lane, drive_lane

    def submit(self, unit: Part, start: int, stop: int, out: torch.Tensor, *, after: Any = None) -> RangeUpload:
        """Elements [start, stop) of the unit's slab to `out` on the device; `after` as for a lane."""
        slab = self.source.ram(unit)
        in_ram = min(max(0, len(slab) - start), stop - start)
        from_ram = from_drive = None
        if in_ram:
            from_ram = self.lane.submit_host(slab[start : start + in_ram], out[:in_ram], after=after, label=unit.name)
        if in_ram < stop - start:
            place = self.source.stored(unit)
            assert place is not None and self.drive_lane is not None
            store, name = place
            offset_bytes = (start + in_ram - len(slab)) * slab.dtype.itemsize
            from_drive = self.drive_lane.submit_stored(
                store, name, out[in_ram:], offset_bytes=offset_bytes, after=after, label=unit.name
            )
        return RangeUpload(unit, from_ram, from_drive)
