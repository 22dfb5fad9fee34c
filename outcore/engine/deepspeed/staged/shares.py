"""A rank's shares: its part of every trainable parameter, which is what the optimizer updates as a unit.

States move and are updated in chunks (the streaming engine's `StateChunk`, with a share as its unit). A chunk never
crosses from one parameter into the next, so that it starts at the parameter's first element on the drive as well as in
RAM, and so that 8-bit blocks belong to one parameter. Cost: a parameter of a few elements takes a page of states of its
own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outcore.common.quantities import round_up
from outcore.optim import BLOCK_NUMEL, StateFormat
from outcore.sizing.streaming import CHUNK_NUMEL
from outcore.states import StateChunk


@dataclass(eq=False)
class Share:
    """What this rank holds of one trainable parameter."""

    param: Any
    """DeepSpeed's partitioned parameter; its `ds_tensor` is the share with padding."""
    index: int
    """In order of update."""
    sub_group: int
    """DeepSpeed's; shares of one are submitted to the optimizer together."""
    numel: int
    """Elements without the padding of the last rank; may be 0 on a rank beyond the parameter's end."""
    param_group: int
    element_offset: int
    """Key of stochastic rounding: the same whatever the residency."""
    dtype: torch.dtype
    """Type of its elements."""
    grad: torch.Tensor | None
    """[numel] in RAM, what DeepSpeed accumulates into; None: on the drive."""
    home: torch.Tensor | None = None
    """[numel] in RAM, what the optimizer reads and writes; None: on the drive."""
    on_device: torch.Tensor | None = None
    """[numel] where DeepSpeed keeps the share on the device: the home is copied there after an update."""
    has_grad: bool = True
    """Whether any micro-batch of the step gave it a gradient; otherwise it counts as zero."""
    is_zeroed: bool = False
    """Whether `grad` is zero since an update without a gradient: no step, applied or skipped, has written it since."""
    loan: torch.Tensor | None = None
    """[numel with padding] of the parameters' type in the memory of `grad`: holds the share from an update until the
    next gradient, where it has no home. None: the memory does not fit, or there is none."""

    @property
    def ds_id(self) -> int:
        return self.param.ds_id

    @property
    def name(self) -> str:
        """For people and for the store."""
        return f"parameter {self.ds_id}"

    def chunks(self, state_format: StateFormat, chunk_numel: int = CHUNK_NUMEL) -> list[StateChunk]:
        """All of the share, in order; no chunk has a home yet."""
        cut = []
        for start in range(0, self.numel, chunk_numel):
            stop = min(start + chunk_numel, self.numel)
            cut.append(StateChunk(self, start, stop, self.element_offset + start, state_format))
        return cut


def real_numel(ds_numel: int, padded_numel: int, rank: int) -> int:
    """Elements of a rank's share that belong to the parameter."""
    return max(0, min(padded_numel, ds_numel - rank * padded_numel))


def element_offsets(padded_numels: list[int], rank: int, world_size: int) -> list[int]:
    """Position at which each share starts in the model, in whole blocks: keys that no two shares of any rank have in
    common."""
    offsets, base = [], 0
    for padded in padded_numels:
        step = round_up(padded, BLOCK_NUMEL)
        offsets.append(base + rank * step)
        base += step * world_size
    return offsets
