"""Which expert makes room for another: the one that will be asked for latest, as far as one can tell.

Layers ask in turn, so what lies between a layer and its next visit is known; whether a visit asks for an expert is not.
It is taken for as likely as it was: half by the last visits, half by some thirty (`LATELY`, `OFTEN`). An expert asked
for by a share p of the visits of its layer, which comes next after a share d of a pass, is expected in d + 1/p - 1
passes. Where passes ask for all experts (p = 1) this is Belady's rule for a known order: what the pass has just used
goes first and the rest stays, where the least recently used of a cycle is the one that is needed next. Where tokens
choose few, d counts little and the often chosen stay. What a drive has to give again takes longer than what RAM gives,
and counts as needed sooner by as much (`DRIVE_COST`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

DRIVE_COST = 8
"""How many times as long a drive takes to give an expert as RAM: some 5 GB/s beside some 40."""
UNKNOWN_PASSES = 16.0
"""Passes until an expert is asked for, as long as its layer has asked for none: a token chooses some 8 of 128."""
Key = tuple[int, int]
"""(layer, expert)."""
LATELY, OFTEN = 1 / 2, 1 / 16
"""Weights of a visit in its layer's two moving averages. One alone loses to the least recently used on traces that
repeat themselves (1/16) or on skewed ones that do not (1/2); half of each does on none of those tried."""


class NextUses:
    """What lies in which slot, and when it will be asked for. `num_experts`: of each layer; `in_ram`: so many of them,
    the first ones, have a home in RAM and the others on a drive."""

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
        """Share of a pass until each layer asks again."""
        self._layer, self._place = np.full(num_slots, -1), np.full(num_slots, len(self._passes) - 1)
        """Layer of what lies in a slot, and where its passes stand."""
        self._in_pass = np.zeros(self._width, dtype=bool)
        """Which experts of the layer that asks now it has asked for in this pass."""
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
        """((layer, expert), slot) of up to so many of those wanted, for which what lies in the slot makes room because
        it will be asked for later; none of `kept`."""
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
        """In how many passes what lies in each slot will be asked for, by what it costs to bring it again."""
        return (self._passes.take(self._place) + self._ahead.take(self._layer)) / self._cost.take(self._place)

    @staticmethod
    def _last(when: np.ndarray, count: int) -> list[int]:
        found = np.argpartition(when, len(when) - count)[len(when) - count :]
        return found[np.argsort(-when[found], kind="stable")].tolist()
