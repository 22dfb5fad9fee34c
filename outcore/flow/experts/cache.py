"""Experts on the device as they are chosen: slots of one expert each.

A layer asks for the experts that its router chose. Experts in a slot are hits. The lanes read the others from their
home, RAM or NVMe, each once. A call on few tokens uses few experts: they form one group, which is computed when its
last expert has arrived. A call on many tokens is computed group by group, experts that are already there first, while
the next group is read. A layer that uses nearly all of its experts is likely to be followed by another one that does,
so as many of the next layer's are read ahead. At most two groups are read but not yet computed with. The other slots
keep their experts from pass to pass (`NextUses` says which leave).

An expert can be evicted safely: copies into its slot wait for the work that was queued with it.

Which expert makes room for another: the one that will be asked for latest, as far as one can tell.

Layers ask in turn, so what lies between a layer and its next visit is known; whether a visit asks for an expert is not.
It is taken for as likely as it was: half by the last visits, half by some thirty (`LATELY`, `OFTEN`). An expert asked
for by a share p of the visits of its layer, which comes next after a share d of a pass, is expected in d + 1/p - 1
passes. Where passes ask for all experts (p = 1) this is Belady's rule for a known order: what the pass has just used
goes first and the rest stays, where the least recently used of a cycle is the one that is needed next. Where tokens
choose few, d counts little and the often chosen stay. What a drive has to give again takes longer than what RAM gives,
and counts as needed sooner by as much (`DRIVE_COST`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from outcore.common.deadline import Deadline
from outcore.flow.experts.form import form_of
from outcore.flow.parts import Part
from outcore.flow.trace import Stalls
from outcore.flow.weights import RangeUpload, SlabRanges, settle
from outcore.staging.pool import SmallCopies

DRIVE_COST = 8
"""Cost of reading an expert from a drive, relative to RAM: about 5 GB/s against about 40."""
UNKNOWN_PASSES = 16.0
"""Assumed passes until an expert is used, before its layer has used any: a token chooses about 8 of 128."""
Key = tuple[int, int]
"""(layer, expert)."""
LATELY, OFTEN = 1 / 2, 1 / 16
"""Weights of a visit in its layer's two moving averages. One alone loses to the least recently used on traces that
repeat themselves (1/16) or on skewed ones that do not (1/2); half of each does on none of those tried."""


class NextUses:
    """Experts in the slots, and forecasts of when each will be used. `num_experts`: of each layer; `in_ram`: how many
    of them, from the first on, live in RAM. The others are on a drive."""

    def __init__(self, num_slots: int, num_experts: Mapping[int, int], in_ram: Mapping[int, int]) -> None:
        self._rank = {layer: rank for rank, layer in enumerate(sorted(num_experts))}
        self._width = max(num_experts.values())
        self._chosen = np.zeros((len(num_experts), 2, self._width))
        """Moving averages of whether an expert was asked for: [layers, lately and often, experts]."""
        self._passes = np.append(np.full(len(num_experts) * self._width, UNKNOWN_PASSES), np.inf)
        """Passes from one request for an expert to the next, [layers * experts], and of nothing behind them."""
        self._cost = np.ones(len(self._passes))
        for layer, rank in self._rank.items():
            self._cost[rank * self._width + in_ram[layer] : (rank + 1) * self._width] = DRIVE_COST
        self._ahead = np.zeros(len(num_experts))
        """Share of a pass until each layer runs again."""
        self._layer, self._place = np.full(num_slots, -1), np.full(num_slots, len(self._passes) - 1)
        """Layer of what lies in a slot, and where its passes stand."""
        self._in_pass = np.zeros(self._width, dtype=bool)
        """True for the experts that the layer at work has asked for in this pass."""
        self._now, self._calls = len(num_experts), 0
        self._expected_calls: float = np.inf

    @property
    def is_last_call(self) -> bool:
        """Whether the layer asks no more in this pass, as the layer before it did; False in the first layer."""
        return self._calls >= self._expected_calls

    def visit(self, layer: int, experts: Sequence[int] | np.ndarray) -> None:
        """A layer asks for experts: once for each call of a pass, calls one after the other."""
        rank = self._rank[layer]
        if rank == self._now:
            self._calls += 1
        else:
            self._expected_calls = self._calls if rank > self._now else np.inf
            self._now, self._calls = rank, 1
            self._in_pass[:] = False
            self._ahead = ((np.arange(len(self._ahead)) - rank - 1) % len(self._ahead) + 1) / len(self._ahead)
        self._in_pass[experts] = True
        for averages, weight in zip(self._chosen[rank], (LATELY, OFTEN), strict=True):
            averages *= 1 - weight
            averages[experts] += weight
        share = self._chosen[rank].mean(axis=0)
        self._passes[rank * self._width : (rank + 1) * self._width] = 1 / np.maximum(share, 1e-9)

    def put(self, slot: int, layer: int, expert: int) -> None:
        """The expert lies there from now on."""
        self._layer[slot] = self._rank[layer]
        self._place[slot] = self._rank[layer] * self._width + expert

    def clear(self, slot: int) -> None:
        """Nothing of use lies there."""
        self._layer[slot], self._place[slot] = -1, len(self._passes) - 1

    def latest(self, count: int, kept: Collection[int]) -> list[int]:
        """Find `count` slots: empty ones first, then those that will be asked for latest; none of `kept`."""
        if not count:
            return []
        when = self._when()
        if not self.is_last_call:  # the next call is likely to ask again
            own = np.flatnonzero(self._layer == self._now)
            when[own[self._in_pass[self._place[own] % self._width]]] = 0
        when[list(kept)] = -1
        return self._last(when, count)

    def sooner(self, wanted: Sequence[Key], most: int, kept: Collection[int]) -> list[tuple[Key, int]]:
        """((layer, expert), slot) for up to `most` wanted experts that will be used sooner than the expert in the slot.
        Slots in `kept` are left alone."""
        if not wanted:
            return []
        rank, expert = np.array([(self._rank[layer], expert) for layer, expert in wanted]).reshape(-1, 2).T
        wanted_at = rank * self._width + expert
        wanted_when = (self._passes[wanted_at] + self._ahead[rank]) / self._cost[wanted_at]
        first, when = np.argsort(wanted_when, kind="stable")[: min(most, len(self._layer) - len(kept))], self._when()
        when[list(kept)] = -1
        places = self._last(when, len(first)) if len(first) else []
        return [(wanted[at], place) for at, place in zip(first, places) if wanted_when[at] < when[place]]

    def _when(self) -> np.ndarray:
        """Passes until each slot's expert is used, divided by the cost of reading it again: the highest goes first."""
        return (self._passes.take(self._place) + self._ahead.take(self._layer)) / self._cost.take(self._place)

    @staticmethod
    def _last(when: np.ndarray, count: int) -> list[int]:
        found = np.argpartition(when, len(when) - count)[len(when) - count :]
        return found[np.argsort(-when[found], kind="stable")].tolist()


NEARLY_ALL = 0.9
"""Share of a layer's experts: a call that uses more starts reading the next layer's experts ahead."""


@dataclass
class ExpertCounts:
    """Sums since the start."""

    asked: int = 0
    """Experts that layers asked for, each once a call."""
    hits: int = 0
    """Experts of these that no byte was read for."""
    read_bytes: int = 0
    """Bytes brought into slots, from wherever they live."""
    for_cpu_bytes: int = 0
    """Bytes read from a drive because the CPU was to multiply them."""

    @property
    def hit_rate(self) -> float | None:
        """Share of the experts asked for that were already in a slot; None before the first request."""
        return self.hits / self.asked if self.asked else None


@dataclass
class _Slot:
    """One expert on the device, or on its way there."""

    place: int
    arriving: RangeUpload | None
    """Transfer that brings the expert; None once it is there."""
    is_ahead: bool = False
    """Whether it was read before anybody asked for it."""


class ExpertCache:
    """Slots for the experts of `parts` (by layer), of which `group` at most are computed together. `in_ram`: of each
    layer so many experts, the first ones, live in RAM, the others on a drive; None: all in RAM. One call at a time,
    from one thread."""

    def __init__(
        self,
        parts: Mapping[int, Part],
        ranges: SlabRanges,
        num_slots: int,
        group: int,
        device: torch.device,
        stalls: Stalls,
        in_ram: Mapping[int, int] | None = None,
    ) -> None:
        assert 0 < 2 * group <= max(2, num_slots), "a group is computed while the next one comes"
        self.parts, self.num_slots = dict(parts), num_slots
        self.forms = {layer: form_of(part) for layer, part in parts.items()}
        self.counts = ExpertCounts()
        self._ranges, self._stalls = ranges, stalls
        size_bytes = max(form.size_bytes for form in self.forms.values())
        self.memory = torch.zeros((num_slots, size_bytes), dtype=torch.uint8, device=device)
        """[slots, bytes of one expert]."""
        self.group, self._streamed = group, max(1, min(group, num_slots // 8))
        """Experts that are read together where a call touches more than a group: two of these pass through the slots,
        which leaves most of them to what stays."""
        layers = sorted(parts)
        self._next = dict(pairwise(layers))
        self._table: dict[Key, _Slot] = {}
        self._keys: list[Key | None] = [None] * num_slots
        """Expert in each slot."""
        num_experts = {layer: form.num_experts for layer, form in self.forms.items()}
        self._in_ram = num_experts if in_ram is None else in_ram
        self._uses = NextUses(num_slots, num_experts, self._in_ram)
        shape = len(layers), max(form.num_experts for form in self.forms.values())
        self.where = torch.full(shape, -1, dtype=torch.int32, device=device)
        """Slot of each expert [layers, experts], -1 where it is in none, as `settle` left it; on the device."""
        self.where_now = torch.full(shape, -1, dtype=torch.int32)
        """Copy of it in RAM."""
        self._row = {layer: row for row, layer in enumerate(layers)}
        self._moved, self._just = set[Key](), set[Key]()
        """Experts whose slot has changed since `settle`, and those so recent that the next `settle` leaves them out."""
        self._over: dict[int, Any] = {}
        """Event after the last use of a slot; those that are missing are free since `_since`."""
        self._since = ranges.lane.streams.now()

    def groups(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (experts, their slots) group after group. A group is ready for work on the current stream until the
        next is asked for. `experts`: each once. Raises EngineError if one could not be read."""
        self._uses.visit(layer, experts)
        asked = [(layer, expert) for expert in experts]
        missing = deque(key for key in asked if key not in self._table)
        here = sorted((key for key in asked if key in self._table), key=lambda key: self._table[key].is_ahead)
        coming = {self._table[key].place for key in here if self._table[key].is_ahead}  # and not computed with yet
        pinned = {self._table[key].place for key in here}
        self.counts.asked, self.counts.hits = self.counts.asked + len(asked), self.counts.hits + len(here) - len(coming)
        if len(asked) <= self.group:
            waiting = deque([here + self._fetch(missing, len(missing), pinned)])
        else:
            waiting = deque(here[n : n + self.group] for n in range(0, len(here), self.group))
        looks_ahead = len(asked) >= NEARLY_ALL * self.forms[layer].num_experts and self._uses.is_last_call
        num_ahead = 0
        while waiting or missing:
            while (
                missing and len(coming) <= self._streamed and (fetched := self._fetch(missing, self._streamed, pinned))
            ):
                coming.update(self._table[key].place for key in fetched)
                waiting.append(fetched)
            if looks_ahead and not missing:
                num_ahead += self._read_ahead(layer, 2 * self._streamed - len(coming) - num_ahead, pinned)
            group = waiting.popleft()
            slots = self._arrived(group)
            yield [expert for _, expert in group], slots
            self._over.update(dict.fromkeys(slots, self._ranges.lane.streams.now()))
            pinned.difference_update(slots)
            coming.difference_update(slots)

    def fill(self) -> None:
        """Begin to read as many experts as there are slots, of every layer as many, those on a drive first: before
        anything is known of what will be chosen."""
        keys = [(layer, expert) for expert in range(self.where.shape[1]) for layer in self.parts]
        keys.sort(key=lambda key: key[1] < self._in_ram[key[0]])
        self._bring([key for key in keys if key[1] < self.forms[key[0]].num_experts][: self.num_slots], set())

    def settle(self, copies: SmallCopies) -> None:
        """Bring `where` up to date for passes that are queued from now on. None must be under way that reads it.
        What has only just been asked for counts from the next time on: waiting for it would take longer than it saves.
        EngineError for what could not be read."""
        for key in self._moved - self._just:
            slot = self._table.get(key)
            if slot is not None and slot.arriving is not None:
                slot.arriving.wait_stream()
                slot.arriving = None
            self.where_now[self._row[key[0]], key[1]] = -1 if slot is None else slot.place
        if self._moved - self._just:
            copies.into(self.where_now, self.where)
        self._moved, self._just = self._just, set()

    def used(self) -> None:
        """Note that work queued so far may read any slot."""
        self._over, self._since = {}, self._ranges.lane.streams.now()

    def adapt(self, chosen: torch.Tensor, where: torch.Tensor, most: int) -> None:
        """Learn from the experts that a pass chose, [layers, pairs], with the slots in `where`. Start reading some of
        the missed ones, where they are likely to be used sooner than what they evict."""
        missing = []
        for layer, numbers, places in zip(self.parts, chosen.numpy(), where.numpy(), strict=True):
            experts = np.unique(numbers)
            self.counts.asked += len(experts)
            self.counts.hits += int((places[experts] >= 0).sum())
            self._uses.visit(layer, experts)
            missing += [(layer, expert) for expert in experts.tolist() if (layer, expert) not in self._table]
        kept = {slot.place for slot in self._table.values() if slot.arriving is not None}
        for key, place in self._uses.sooner(missing, most, kept):
            self._put(key, place)
            self._just.add(key)

    def abort(self, deadline: Deadline | None = None) -> None:
        """After a failure: wait for reads under way; what they were to bring is not there."""
        under_way = [slot for slot in self._table.values() if slot.arriving is not None]
        settle([slot.arriving for slot in under_way if slot.arriving is not None], deadline)
        for slot in under_way:
            slot.arriving = None
            self._empty(slot.place)
        self._over, self._since = {}, self._ranges.lane.streams.now()

    def _fetch(self, missing: deque[Key], most: int, pinned: set[int]) -> list[Key]:
        """Begin to read a group: all of it, or nothing where pinned slots leave no room for that."""
        count = min(most, len(missing))
        if self.num_slots - len(pinned) < count:
            return []
        group = [missing.popleft() for _ in range(count)]
        self._bring(group, pinned)
        pinned.update(self._table[key].place for key in group)
        return group

    def _read_ahead(self, layer: int, most: int, pinned: set[int]) -> int:
        """Begin to read experts of the next layer; how many."""
        following = self._next.get(layer)
        if following is None:
            return 0
        kept = pinned | {slot.place for key, slot in self._table.items() if key[0] == following}
        keys = [(following, expert) for expert in range(self.forms[following].num_experts)]
        keys = [key for key in keys if key not in self._table][: max(0, min(most, self.num_slots - len(kept)))]
        self._bring(keys, kept, is_ahead=True)
        return len(keys)

    def _bring(self, keys: Sequence[Key], kept: set[int], *, is_ahead: bool = False) -> None:
        """Start reading experts into slots that are free or needed last, but not into those of `kept`."""
        for key, place in zip(keys, self._uses.latest(len(keys), kept), strict=True):
            self._put(key, place, is_ahead=is_ahead)

    def _put(self, key: Key, place: int, *, is_ahead: bool = False) -> None:
        self._empty(place)
        self._table[key] = _Slot(place, self._read(key, place), is_ahead)
        self._keys[place] = key
        self._uses.put(place, *key)
        self._moved.add(key)

    def _empty(self, place: int) -> None:
        gone, self._keys[place] = self._keys[place], None
        self._uses.clear(place)
        if gone is not None:
            self._moved.add(gone)
        if gone is not None and (transfer := self._table.pop(gone).arriving) is not None:  # read ahead in vain
            transfer.wait_stream()
            self._over[place] = None  # it is written to until then

    def _read(self, key: Key, place: int) -> RangeUpload:
        part, form = self.parts[key[0]], self.forms[key[0]]
        after = self._over.get(place, self._since)
        out = self.memory[place, : form.size_bytes].view(part.layout.dtype)
        start, numel = key[1] * out.numel(), out.numel()
        arriving = self._ranges.submit(part, start, start + numel, out, after=after)
        self.counts.read_bytes += form.size_bytes
        return arriving

    def _arrived(self, group: Sequence[Key]) -> list[int]:
        """Slots of these, whose transfers the current stream waits for."""
        slots = [self._table[key] for key in group]
        arriving = [slot.arriving for slot in slots if slot.arriving is not None]
        if arriving:
            reason = "nvme" if any(transfer.is_from_drive for transfer in arriving) else "pcie"
            with self._stalls.until(f"experts of layer {group[0][0]}", reason):
                for transfer in arriving:
                    transfer.wait_stream()
        for slot in slots:
            slot.arriving, slot.is_ahead = None, False
        return [slot.place for slot in slots]
