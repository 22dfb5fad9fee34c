"""Which expert makes room for another: the one that will be asked for latest, as far as one can tell.

Layers ask in turn, so what lies between a layer and its next visit is known; whether a visit asks for an expert is not.
It is taken for as likely as it was: half by the last visits, half by some thirty (`LATELY`, `OFTEN`). An expert asked
for by a share p of the visits of its layer, which comes next after a share d of a pass, is expected in d + 1/p - 1
passes. Where passes ask for all experts (p = 1) this is Belady's rule for a known order: what the pass has just used
goes first and the rest stays, where the least recently used of a cycle is the one that is needed next. Where tokens
choose few, d counts little and the often chosen stay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

LATELY, OFTEN = 1 / 2, 1 / 16
"""Weights of a visit in its layer's two moving averages. One alone loses to the least recently used on traces that
repeat themselves (1/16) or on skewed ones that do not (1/2); half of each does on none of those tried."""


class NextUses:
    """What lies in which slot, and when it will be asked for. `num_experts`: of each layer."""

    def __init__(self, num_slots: int, num_experts: Mapping[int, int]) -> None:
        self._rank = {layer: rank for rank, layer in enumerate(sorted(num_experts))}
        self._chosen = np.zeros((2, len(num_experts), max(num_experts.values())))
        """Moving averages of whether an expert was asked for: [lately and often, layers, experts]."""
        self._layer, self._expert = np.zeros((2, num_slots), dtype=np.int64)
        self._is_used = np.zeros(num_slots, dtype=bool)
        self._in_pass = np.zeros(max(num_experts.values()), dtype=bool)
        """Which experts of the layer that asks now it has asked for in this pass."""
        self._now, self._calls = len(num_experts), 0
        self._expected_calls: float = np.inf

    @property
    def is_last_call(self) -> bool:
        """Whether the layer asks no more in this pass, as the layer before it did; False in the first layer."""
        return self._calls >= self._expected_calls

    def visit(self, layer: int, experts: Sequence[int]) -> None:
        """A layer asks for experts: once for each call of a pass, calls one after the other."""
        rank = self._rank[layer]
        if rank == self._now:
            self._calls += 1
        else:
            self._expected_calls = self._calls if rank > self._now else np.inf
            self._now, self._calls = rank, 1
            self._in_pass[:] = False
        self._in_pass[experts] = True
        for averages, weight in zip(self._chosen, (LATELY, OFTEN), strict=True):
            averages[rank] *= 1 - weight
            averages[rank, experts] += weight

    def put(self, slot: int, layer: int, expert: int) -> None:
        """The expert lies there from now on."""
        self._layer[slot], self._expert[slot], self._is_used[slot] = self._rank[layer], expert, True

    def clear(self, slot: int) -> None:
        """Nothing of use lies there."""
        self._is_used[slot] = False

    def latest(self, count: int, kept: Collection[int]) -> list[int]:
        """Find `count` slots: empty ones first, then those that will be asked for latest; none of `kept`."""
        if not count:
            return []
        ahead = (self._layer - self._now - 1) % len(self._rank) + 1
        often = self._chosen[:, self._layer, self._expert].mean(axis=0)
        when = np.where(self._is_used, ahead / len(self._rank) + 1 / np.maximum(often, 1e-9), np.inf)
        if not self.is_last_call:  # the next call is likely to ask again
            when[self._is_used & (self._layer == self._now) & self._in_pass[self._expert]] = 0
        when[list(kept)] = -1
        found = np.argpartition(when, len(when) - count)[len(when) - count :]
        return found[np.argsort(-when[found], kind="stable")].tolist()
