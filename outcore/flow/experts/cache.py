"""Experts on the device as they are chosen: slots of one expert each, the least recently chosen makes room.

A layer asks for the experts that its router chose. Those that lie in a slot are hits; the others are read from their
home, RAM or NVMe, each once, by the lanes that bring everything else. Where all that a call touches fits into one group
(a few tokens), it is computed together when the last has come. Many tokens touch more than that: then groups follow one
another, those that are there first, and the next ones are on the way while one is computed. When nearly all experts of
a layer are touched, so will be the next layer's, which are read ahead into slots that this layer does not use.

What is evicted is known to be read no more: copies into a slot wait for the work that was queued with it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from outcore.common.deadline import Deadline
from outcore.flow.experts.form import ExpertForm, form_of
from outcore.flow.parts import Part
from outcore.flow.trace import Stalls
from outcore.flow.weights import RangeUpload, SlabRanges, settle

Key = tuple[int, int]
"""(layer, expert)."""
NEARLY_ALL = 0.9
"""Share of a layer's experts touched from which the next layer's are read before they are asked for."""


@dataclass
class ExpertCounts:
    """Sums since the start."""

    asked: int = 0
    """Experts that layers asked for, each once a call."""
    hits: int = 0
    """Experts of these that no byte was read for."""
    read_bytes: int = 0
    """Bytes brought into slots, from wherever they live."""

    @property
    def hit_rate(self) -> float | None:
        """Share of the experts asked for that were there; None: none was asked for yet."""
        return self.hits / self.asked if self.asked else None


@dataclass
class _Slot:
    """One expert on the device, or on its way there."""

    place: int
    arriving: list[RangeUpload]
    is_ahead: bool = False
    """Whether it was read before anybody asked for it."""


class ExpertCache:
    """Slots for the experts of `parts` (by layer), of which `group` at most are computed together. One call at a time,
    from one thread."""

    def __init__(
        self,
        parts: Mapping[int, Part],
        ranges: SlabRanges,
        num_slots: int,
        group: int,
        device: torch.device,
        stalls: Stalls,
    ) -> None:
        assert 0 < 2 * group <= max(2, num_slots), "a group is computed while the next one comes"
        self.parts, self.num_slots = dict(parts), num_slots
        self.forms = {layer: _form(part) for layer, part in parts.items()}
        self.counts = ExpertCounts()
        self._ranges, self._stalls = ranges, stalls
        size_bytes = max(form.size_bytes for form in self.forms.values())
        self.memory = torch.zeros((num_slots, size_bytes), dtype=torch.uint8, device=device)
        """[slots, bytes of one expert]."""
        self.group = group
        layers = sorted(parts)
        self._next = dict(pairwise(layers))
        self._table: OrderedDict[Key, _Slot] = OrderedDict()
        """Least recently asked for first."""
        self._free = list(range(num_slots))[::-1]
        self._over: dict[int, Any] = {}
        """Event after the last use of a slot; those that are missing are free since `_since`."""
        self._since = ranges.lane.streams.now()

    def groups(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """(experts, their slots) of group after group, each ready for work queued on the current stream until the next
        is asked for. `experts`: each once. EngineError for what could not be read."""
        keys = [(layer, expert) for expert in experts]
        here, missing = self._ask(keys)
        pinned = set(here)  # these and what is on its way: not computed yet
        if len(keys) <= self.group:
            waiting = deque([here + self._fetch(missing, len(missing), pinned)])
        else:
            waiting = deque(here[n : n + self.group] for n in range(0, len(here), self.group))
        looks_ahead = len(keys) >= NEARLY_ALL * self.forms[layer].num_experts
        while waiting or missing:
            while missing and (fetched := self._fetch(missing, self.group, pinned)):
                waiting.append(fetched)
            if looks_ahead and not missing:
                self._read_ahead(layer)
                looks_ahead = False
            group = waiting.popleft()
            slots = self._arrived(group)
            yield [expert for _, expert in group], slots
            self._over.update(dict.fromkeys(slots, self._ranges.lane.streams.now()))
            pinned.difference_update(group)

    def _ask(self, keys: Sequence[Key]) -> tuple[list[Key], deque[Key]]:
        """(those in slots or on their way, the others)."""
        here = [key for key in keys if key in self._table]
        self.counts.asked += len(keys)
        for key in here:
            self._table.move_to_end(key)
            self.counts.hits += not self._table[key].is_ahead
            self._table[key].is_ahead = False
        return here, deque(key for key in keys if key not in self._table)

    def abort(self, deadline: Deadline | None = None) -> None:
        """After a failure: wait for reads under way; what they were to bring is not there."""
        under_way = {key: slot for key, slot in self._table.items() if slot.arriving}
        settle([transfer for slot in under_way.values() for transfer in slot.arriving], deadline)
        for key, slot in under_way.items():
            del self._table[key]
            self._free.append(slot.place)
        self._over, self._since = {}, self._ranges.lane.streams.now()

    def _fetch(self, missing: deque[Key], most: int, pinned: set[Key]) -> list[Key]:
        """Begin to read a group: all of it, or nothing where pinned ones leave no room for that."""
        count = min(most, len(missing))
        if self.num_slots - len(pinned) < count:
            return []
        group = [missing.popleft() for _ in range(count)]
        pinned.update(group)
        for key in group:
            self._read(key, pinned)
        return group

    def _read(self, key: Key, kept: set[Key], *, is_ahead: bool = False) -> None:
        if not self._free:
            oldest = next(other for other in self._table if other not in kept)
            gone = self._table.pop(oldest)
            for transfer in gone.arriving:  # read ahead in vain: the slot is written to until it has ended
                transfer.wait_stream()
                self._over[gone.place] = None
            self._free.append(gone.place)
        place = self._free.pop()
        part, form = self.parts[key[0]], self.forms[key[0]]
        after, itemsize = self._over.get(place, self._since), part.layout.dtype.itemsize
        arriving: list[RangeUpload] = []
        try:
            for piece in form.pieces:
                start, size_bytes = piece.start + key[1] * piece.numel, piece.numel * itemsize
                out = self.memory[place, piece.at_bytes : piece.at_bytes + size_bytes].view(part.layout.dtype)
                arriving.append(self._ranges.submit(part, start, start + piece.numel, out, after=after))
                self.counts.read_bytes += size_bytes
        except BaseException:
            settle(arriving)
            self._free.append(place)
            raise
        self._table[key] = _Slot(place, arriving, is_ahead)

    def _read_ahead(self, layer: int) -> None:
        """Begin to read what fits of the next layer's experts beside this one's."""
        following = self._next.get(layer)
        if following is None:
            return
        kept = {key for key in self._table if key[0] in (layer, following)}
        for expert in range(self.forms[following].num_experts):
            if len(kept) >= self.num_slots:
                return
            if (following, expert) not in self._table:
                kept.add((following, expert))
                self._read((following, expert), kept, is_ahead=True)

    def _arrived(self, group: Sequence[Key]) -> list[int]:
        """Slots of these, whose transfers the current stream waits for."""
        slots = [self._table[key] for key in group]
        arriving = [transfer for slot in slots for transfer in slot.arriving]
        if arriving:
            reason = "nvme" if any(transfer.is_from_drive for transfer in arriving) else "pcie"
            with self._stalls.until(f"experts of layer {group[0][0]}", reason):
                for transfer in arriving:
                    transfer.wait_stream()
        for slot in slots:
            slot.arriving = []
        return [slot.place for slot in slots]


def _form(part: Part) -> ExpertForm:
    form = form_of(part)
    assert form is not None, f"the experts of {part.name} were not set apart"
    return form
