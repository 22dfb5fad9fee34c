"""Cuts of a batch: the rows that a layer computes at a time, and its arguments cut into them.

A layer that is computed again holds far more than its input. Where the device's budget has no room for a whole batch it
is computed row after row within one visit, so that the weights still cross once. The estimate is a pure function of
shapes: the same run cuts in the same way, also after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from outcore.sizing.streaming import token_bytes

Grads = list[torch.Tensor | None]


@dataclass(frozen=True)
class Rows:
    """A batch in cuts. `batch` None: it cannot be cut, or need not be."""

    batch: int | None
    per_cut: int

    @property
    def cuts(self) -> list[slice]:
        if self.batch is None:
            return [slice(None)]
        return [slice(start, start + self.per_cut) for start in range(0, self.batch, self.per_cut)]

    def is_cut(self, tensor: torch.Tensor) -> bool:
        """Whether each cut gets some rows of this tensor, rather than all of it."""
        return self.batch is not None and tensor.ndim > 1 and tensor.shape[0] == self.batch

    def of(self, tensor: torch.Tensor, cut: slice) -> torch.Tensor:
        return tensor[cut] if self.is_cut(tensor) else tensor

    def grads_of(self, grads: Sequence[torch.Tensor | None], outputs: list[torch.Tensor], starts: list[int]) -> Grads:
        """The gradients of a cut's outputs; `starts` counts on."""
        if self.batch is None:
            return list(grads)
        found: Grads = []
        for number, (grad, output) in enumerate(zip(grads, outputs, strict=True)):
            start = starts[number]
            starts[number] += len(output)
            found.append(None if grad is None else grad[start : starts[number]])
        return found

    def joined(self, given: torch.Tensor, parts: Grads) -> torch.Tensor | None:
        """The gradient of an argument from those of its cuts."""
        if not self.is_cut(given):
            total: torch.Tensor | None = None
            for part in parts:
                total = add(total, part)
            return total
        if all(part is None for part in parts):
            return None
        rows = [self.of(given, cut) for cut in self.cuts]
        return torch.cat([torch.zeros_like(x) if part is None else part for x, part in zip(rows, parts, strict=True)])


def add(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    """Sum of two gradients, in place of the first; None counts as nothing."""
    return more if total is None else total if more is None else total.add_(more)


WHOLE = Rows(None, 0)


def rows_of(layer: nn.Module, tensors: Sequence[torch.Tensor], room_bytes: int | None) -> Rows:
    """Cuts of the first tensor, [B, T, H], and of what goes along with it. `room_bytes` None: there is room enough."""
    hidden = tensors[0] if tensors else None
    if room_bytes is None or hidden is None or hidden.ndim != 3 or hidden.shape[0] == 1:
        return WHOLE
    batch, length = hidden.shape[:2]
    if batch == length or any(batch in tensor.shape[1:2] for tensor in tensors if tensor.ndim > 1):
        return WHOLE  # it does not show which dimension counts the rows
    per_cut = max(1, room_bytes // max(1, length * layer_token_bytes(layer, hidden.shape[-1], hidden.element_size())))
    return WHOLE if per_cut >= batch else Rows(batch, per_cut)


def layer_token_bytes(layer: nn.Module, hidden_size: int, element_bytes: int) -> int:
    """Device memory that one token of a layer takes while it is differentiated (`sizing.streaming`)."""
    features = sum(m.in_features + m.out_features for m in layer.modules() if isinstance(m, nn.Linear))
    stacked = (p for p in layer.parameters() if p.ndim == 3)
    return token_bytes(features + sum(sum(p.shape[1:]) for p in stacked), hidden_size, element_bytes)
