"""What a token of a pass costs: a layer's matrices, the same for all, and attention, which grows with its context."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from outcore.sizing.inference.needs import KvSize
from outcore.sizing.shape import ModelShape


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
