"""Attention masks of micro-batches that wait: boolean [B, 1, T, T], held as bits.

The vertical schedule runs every micro-batch through a layer before the next layer, so what a layer is called with waits
for a whole step. A mask of packed or padded rows is by far the largest part of that: B x T x T bytes for each kind of
layer, 268 MB at 8 micro-batches of 2 x 4,096 tokens, 34 MB as bits. Each use makes the mask anew: two kernels that
write B x T x T bytes, little beside the attention that reads it. Nothing is asked of the device, so nothing waits for
it. Masks of numbers (eager attention adds them) stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MIN_MASK_NUMEL = 1 << 20
"""Smaller masks stay as they are: nothing to gain."""


@dataclass(frozen=True)
class BitMask:
    """A boolean mask as bits, eight in a byte."""

    bits: torch.Tensor
    """uint8, 1-D."""
    whole: torch.Size
    """Shape of the mask, with size 1 along dimensions in which it was expanded."""
    shape: torch.Size

    @classmethod
    def of(cls, mask: torch.Tensor) -> BitMask:
        whole = mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())]
        flat = torch.nn.functional.pad(whole.reshape(-1), (0, -whole.numel() % 8))
        bits = (flat.view(-1, 8) * _places(mask.device)).sum(1, dtype=torch.uint8)
        return cls(bits, whole.shape, mask.shape)

    def mask(self) -> torch.Tensor:
        """The mask again, expanded where it was."""
        flat = (self.bits[:, None] & _places(self.bits.device)) != 0
        return flat.view(-1)[: self.whole.numel()].view(self.whole).expand(self.shape)


def _places(device: torch.device) -> torch.Tensor:
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)


class MaskShrinker:
    """Replaces masks among the arguments of calls; one that several layers share is shrunk once."""

    def __init__(self, min_numel: int = MIN_MASK_NUMEL) -> None:
        self._min_numel = min_numel
        self._known: dict[int, tuple[torch.Tensor, BitMask]] = {}

    @property
    def has_shrunk(self) -> bool:
        """Whether there was any large mask."""
        return bool(self._known)

    def shrunk(self, value: Any) -> Any:
        """`value`, or what stands for it when it is a large mask."""
        if not isinstance(value, torch.Tensor) or value.dtype != torch.bool or value.ndim != 4:
            return value
        if value.numel() < self._min_numel:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = (value, BitMask.of(value))  # the first keeps the id taken
        return self._known[id(value)][1]


def restored(value: Any) -> Any:
    """`value`, or the mask that it stands for."""
    return value.mask() if isinstance(value, BitMask) else value
