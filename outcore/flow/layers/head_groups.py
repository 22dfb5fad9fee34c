"""Attention of a layer, one group of heads after another: how its rows lie in memory, and how it is asked for.

Legend: B rows, T tokens, t tokens of a tile, G groups, H heads, D width of a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Attention = Callable[..., tuple[torch.Tensor, Any]]


@dataclass(frozen=True)
class Heads:
    """How rows of a group of heads that share keys and values are made up: of queries, keys, values, in that order."""

    groups: int
    shapes: tuple[tuple[int, int], ...]
    """(heads of a group, width of a head) of queries, keys, values."""

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor]) -> Heads:
        """Make as many groups as there are heads of keys; one where these are not those of values, too, or do not
        divide the queries'. `parts`: queries, keys, values [B, H, t, D]."""
        query, key, value = parts
        heads = key.shape[1]
        groups = heads if value.shape[1] == heads and query.shape[1] % heads == 0 else 1
        return cls(groups, tuple((part.shape[1] // groups, part.shape[3]) for part in parts))

    @property
    def widths(self) -> list[int]:
        return [heads * width for heads, width in self.shapes]

    @property
    def result_width(self) -> int:
        return self.shapes[0][0] * self.shapes[2][1]

    def pack(self, parts: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Fill rows [G, B, t, sum of widths] from queries, keys and values [B, H, t, D]."""
        for part, place, shape in zip(parts, rows.split(self.widths, dim=-1), self.shapes, strict=True):
            place.unflatten(-1, shape).copy_(part.unflatten(1, (self.groups, -1)).permute(1, 0, 3, 2, 4))

    def unpacked(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Undo `pack`."""
        parts = zip(rows.split(self.widths, dim=-1), self.shapes, strict=True)
        return [part.unflatten(-1, shape).permute(1, 0, 3, 2, 4).flatten(1, 2) for part, shape in parts]

    def of_group(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values [B, H, T, D] of a group's rows [B, T, sum of widths], in the same memory."""
        parts = zip(rows.split(self.widths, dim=-1), self.shapes, strict=True)
        return [part.unflatten(-1, shape).transpose(1, 2) for part, shape in parts]

    def result(self, rows: torch.Tensor) -> torch.Tensor:
        """Attention's result of all heads [B, t, H, D] for rows [G, B, t, result width]."""
        return rows.unflatten(-1, (self.shapes[0][0], -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def pack_result(self, result: torch.Tensor, rows: torch.Tensor) -> None:
        """Fill what `result` is of."""
        of_groups = result.unflatten(2, (self.groups, -1)).permute(2, 0, 1, 3, 4)
        rows.unflatten(-1, of_groups.shape[3:]).copy_(of_groups)


@dataclass(frozen=True)
class AttentionCall:
    """How the layer's code calls its attention."""

    function: Attention
    module: nn.Module
    mask: Any
    more: dict[str, Any]

    def of(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention's result [B, T, H, D] of [B, H, T, D]."""
        return self.function(self.module, query, key, value, self.mask, **self.more)[0]


@dataclass(frozen=True)
class Attending:
    """Attention that a layer asks for: how, and the rows that it is about, at home."""

    heads: Heads
    asked: AttentionCall
    rows: torch.Tensor
    """[G, B, T, width]: queries, keys and values, group by group; on the way back their gradients."""
    results: torch.Tensor
    """[G, B, T, width], room for attention's."""
