"""Attention masks of micro-batches that wait: [B, 1, T, T] held as where each row begins and ends.

The vertical schedule runs every micro-batch through a layer before the next layer, so what a layer is called with waits
for a whole step. A mask of packed or padded rows is by far the largest part of that: B x T x T bytes for each kind of
layer, 268 MB at 8 micro-batches of 2 x 4,096 tokens. In all masks of causal models (documents kept apart, padding,
sliding windows) each row allows one stretch of keys, so two numbers a row hold it: 8 x B x T bytes. Whether a mask is
of that kind is tried by building it again (one read of it and one synchronisation); another kind stays as it is. Each
use builds the mask anew: a few kernels that write B x T x T bytes, little beside the attention that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MIN_MASK_NUMEL = 1 << 20
"""Smaller masks stay as they are: nothing to gain."""


@dataclass(frozen=True)
class RowStretches:
    """A mask [..., Q, K] whose row q allows keys `first`[q] up to, not including, `end`[q]; int32 [..., Q, 1]."""

    first: torch.Tensor
    end: torch.Tensor
    shape: torch.Size
    """Of the mask; dimensions along which it was expanded have size 1 in `first` and `end`."""
    dtype: torch.dtype
    """bool (True: allowed), or the floating type of an additive mask (0: allowed, else the type's lowest number)."""

    @classmethod
    def of(cls, mask: torch.Tensor) -> RowStretches | None:
        """None when the mask is of another kind."""
        if mask.ndim < 2 or not (mask.dtype == torch.bool or mask.is_floating_point()):
            return None
        whole = mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())]
        if whole.shape[-2:] != mask.shape[-2:]:
            return None
        allowed = whole if mask.dtype == torch.bool else whole == 0
        first = allowed.to(torch.uint8).argmax(-1, keepdim=True).to(torch.int32)
        end = first + allowed.sum(-1, keepdim=True, dtype=torch.int32)
        found = cls(first, end, mask.shape, mask.dtype)
        return found if torch.equal(found._whole(), whole) else None

    def mask(self) -> torch.Tensor:
        """The mask again, bit for bit, expanded where it was."""
        return self._whole().expand(self.shape)

    def _whole(self) -> torch.Tensor:
        places = torch.arange(self.shape[-1], dtype=torch.int32, device=self.first.device)
        allowed = (places >= self.first) & (places < self.end)
        if self.dtype == torch.bool:
            return allowed
        zero = torch.zeros((), dtype=self.dtype, device=allowed.device)
        return torch.where(allowed, zero, torch.finfo(self.dtype).min)


class MaskShrinker:
    """Replaces masks among the arguments of calls; one that several layers share is shrunk once."""

    def __init__(self, min_numel: int = MIN_MASK_NUMEL) -> None:
        self._min_numel = min_numel
        self._known: dict[int, tuple[torch.Tensor, Any]] = {}

    def shrunk(self, value: Any) -> Any:
        """`value`, or what stands for it when it is a large mask."""
        if not isinstance(value, torch.Tensor) or value.ndim != 4 or value.numel() < self._min_numel:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = (value, RowStretches.of(value) or value)  # the first keeps the id taken
        return self._known[id(value)][1]


def restored(value: Any) -> Any:
    """`value`, or the mask that it stands for."""
    return value.mask() if isinstance(value, RowStretches) else value
