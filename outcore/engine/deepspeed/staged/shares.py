"""A rank's shares: its part of every trainable parameter, cut into the chunks in which states move and are updated.

A chunk never crosses from one parameter into the next, so that it starts at the parameter's first element on the drive
as well as in RAM, and so that 8-bit blocks belong to one parameter. Cost: a parameter of a few elements takes a page of
states of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from outcore.optim import BLOCK_NUMEL
from outcore.units import round_up

CHUNK_NUMEL = 1 << 22
"""Parameters per chunk: 48 MiB of fp32 states, 8 MiB of 16-bit parameters, whole 4 KiB blocks of both."""


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of one share."""

    share: Share
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def element_offset(self) -> int:
        """Key of stochastic rounding: the same whatever the residency."""
        return self.share.element_offset + self.start

    @property
    def name(self) -> str:
        """Of its states in a store."""
        return f"states {self.share.ds_id} {self.start}"

    @property
    def grad(self) -> torch.Tensor:
        return self.share.grad[self.start : self.stop]

    @property
    def param(self) -> torch.Tensor | None:
        """The parameters in RAM; None where the share lives on the drive."""
        home = self.share.home
        return None if home is None else home[self.start : self.stop]


@dataclass(eq=False)
class Share:
    """What this rank holds of one trainable parameter."""

    param: Any
    """DeepSpeed's partitioned parameter; its `ds_tensor` is the share with padding."""
    ds_id: int
    unit: int
    """DeepSpeed's sub-group, the order of updates."""
    numel: int
    """Elements without the padding of the last rank; may be 0 on a rank beyond the parameter's end."""
    param_group: int
    element_offset: int
    grad: torch.Tensor
    """[numel] in RAM, what DeepSpeed accumulates into."""
    home: torch.Tensor | None = None
    """[numel] in RAM, what the optimizer reads and writes; None: on the drive."""
    on_device: torch.Tensor | None = None
    """[numel] where DeepSpeed keeps the share on the device: the home is copied there after an update."""

    def chunks(self, chunk_numel: int = CHUNK_NUMEL) -> Iterator[Chunk]:
        """All of the share, in order."""
        for start in range(0, self.numel, chunk_numel):
            yield Chunk(self, start, min(start + chunk_numel, self.numel))


def real_numel(ds_numel: int, padded_numel: int, rank: int) -> int:
    """Elements of a rank's share that belong to the parameter."""
    return max(0, min(padded_numel, ds_numel - rank * padded_numel))


def element_offsets(padded_numels: list[int], rank: int, world_size: int) -> list[int]:
    """Where each share starts in the model, in whole blocks: keys that no two shares of any rank have in common."""
    offsets, base = [], 0
    for padded in padded_numels:
        step = round_up(padded, BLOCK_NUMEL)
        offsets.append(base + rank * step)
        base += step * world_size
    return offsets
