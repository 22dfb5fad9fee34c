"""Rates, measured at the start, of weights that the CPU computes where they are.

What a token of a pass costs: a layer's matrices, the same for all, and attention, which grows with its context."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from outcore.common.quantities import GB
from outcore.sizing.inference.needs import KvSize
from outcore.sizing.shape import ModelShape


@dataclass(frozen=True)
class InPlaceRates:
    """Rates of this machine, each beside the other: both read the same memory."""

    WORTH: ClassVar[float] = 0.95
    """Share of a pass's time without the CPU that it may take at most with it; otherwise no layer goes there."""

    BETWEEN_S: ClassVar[float] = 0.0018
    """Between passes: choosing a token and laying out the next pass. Trials of whole passes have it, rates do not."""

    cpu_gb_per_s: Mapping[int, float]
    """GB of weights a second of the CPU's kernels, by tokens of a pass."""
    link_gb_per_s: float
    part_s: float
    """Hand-overs of one layer: its activations to the CPU and back, once for each matrix, and its launches."""

    @staticmethod
    def evenly(names: Sequence[str], count: int) -> tuple[str, ...]:
        """Choose so many for the CPU that the others lie evenly between them."""
        return tuple(names[(2 * n + 1) * len(names) // (2 * count)] for n in range(count))

    def gb_per_s(self, tokens: float) -> float:
        """GB of weights a second of the CPU in a pass of so many tokens."""
        tried = min((n for n in self.cpu_gb_per_s if n >= tokens), default=max(self.cpu_gb_per_s))
        return self.cpu_gb_per_s[tried]

    def cpu_s(self, layers: int, size_bytes: float, tokens: float) -> float:
        """Seconds in which the CPU computes layers of so many bytes together, for so many tokens."""
        return size_bytes / (self.gb_per_s(tokens) * GB) + layers * self.part_s

    def pass_s(self, layers: int, on_cpu_bytes: float, travelling_bytes: float, tokens: int) -> float:
        """Seconds of a pass of which the CPU computes so many layers while the link brings the other bytes."""
        return max(self.cpu_s(layers, on_cpu_bytes, tokens), travelling_bytes / (self.link_gb_per_s * GB))

    def as_tried(self, all_bytes: int, tried: Mapping[int, tuple[int, int, float]]) -> InPlaceRates:
        """The rates by whole passes of some numbers of tokens: (layers on the CPU, their bytes of `all_bytes`,
        seconds). One that was shorter than the link alone shows a faster link, a longer one a slower CPU; for other
        numbers of tokens the most of it."""
        link = max(self.link_gb_per_s, *((all_bytes - size) / s / GB for _, size, s in tried.values()))
        rates = replace(self, link_gb_per_s=link)
        times = {
            tokens: max(1.0, s / rates.pass_s(layers, size, all_bytes - size, tokens))
            for tokens, (layers, size, s) in tried.items()
        }
        most = max(times.values())
        cpu = {tokens: rate / times.get(tokens, most) for tokens, rate in self.cpu_gb_per_s.items()}
        return replace(rates, cpu_gb_per_s=cpu, part_s=self.part_s * most)


@dataclass(frozen=True)
class RowCost:
    """Cost in units of one token without context."""

    LEAST_READ: ClassVar[float] = 0.25
    """Share of a pass that prompts get at least, whatever the attention of the answers beside them costs."""

    context_tokens: float = inf
    """Context whose attention, in all layers, costs as much as their matrices."""
    windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    """(window, share of the attention of layers with it); None: no window."""

    def of(self, start: int, count: int) -> float:
        """Tokens `start` to `start + count` - 1 of a sequence."""
        seen = sum(share * pairs(start, count, window) for window, share in self.windows)
        return count + seen / self.context_tokens

    def most(self, start: int, budget: float, most: int) -> int:
        """The longest chunk from `start` on, of up to `most` tokens, that costs at most this."""
        return bisect_right(range(1, most + 1), budget, key=lambda count: self.of(start, count))


def pairs(start: int, count: int, window: int | None = None) -> float:
    """(token, token that it sees) in a chunk from `start` on; a token sees itself."""
    if window is None or start + count <= window:
        return count * (start + (count + 1) / 2)
    growing = max(0, min(count, window - start))
    return growing * (start + (growing + 1) / 2) + (count - growing) * window


def row_cost_of(shape: ModelShape, kv: KvSize) -> RowCost:
    """The cost by operations: 2 for each parameter that a token meets, 4 a layer for each number of its query and each
    token that it sees. Layers count for attention by their keys' and values' bytes; a model without any has none."""
    if not kv.token_bytes:
        return RowCost()
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim
    windows = tuple((window, size / kv.token_bytes) for window, size in kv.bytes_by_window)
    return RowCost(2 * shape.active_layer_params / attention, windows)
