"""Checkpoint access to the staged engine's states: shares are read and written directly, no flat fp32 buffers between.

Several ranks: a full tensor is gathered from the ranks' shares, one parameter at a time, so any number of ranks can
resume. Writing the master writes the 16-bit parameter as well (its rounding), whatever the format of the states.
"""

from __future__ import annotations

from typing import Any

import torch

from outcore.engine.deepspeed.staged.optimizer import StagedOptimizer
from outcore.engine.deepspeed.state import FAMILIES, Stage3State


class StagedState(Stage3State):
    """See `StateAccess`; weights are gathered as DeepSpeed gathers them."""

    optimizer: StagedOptimizer

    def prepare(self, step: int) -> None:
        """`step` updates are on the clock; the states exist from the start."""
        self.optimizer.updates = step

    def get(self, param: Any, family: str) -> torch.Tensor:
        share = self.optimizer.share_of(param)
        self.optimizer.settle()
        value = self.optimizer.states.read(share, family)  # pyright: ignore[reportArgumentType]
        shape = torch.Size(param.ds_shape)
        if self.engine.world_size == 1:
            return value.view(shape)
        padded = torch.zeros(param.partition_numel(), dtype=torch.float32, device=self.engine.device)
        padded[: share.numel] = value
        whole = torch.empty(padded.numel() * self.engine.world_size, dtype=torch.float32, device=padded.device)
        torch.distributed.all_gather_into_tensor(whole, padded)
        return whole[: shape.numel()].view(shape)

    def begin_restore(self) -> None:
        """Parameters that are whole on the device let go of their old values."""
        self.optimizer.begin_restore()

    def restore(self, param: Any, weight: torch.Tensor, states: dict[str, torch.Tensor]) -> None:
        """Set this rank's share; `weight` is not needed, it is the master rounded."""
        share = self.optimizer.share_of(param)
        start = torch.distributed.get_rank() * param.partition_numel()
        part = {f: states[f].reshape(-1)[start : start + share.numel].to(torch.float32) for f in FAMILIES}
        self.optimizer.states.write(share, part)  # pyright: ignore[reportArgumentType]

    def end_restore(self) -> None:
        self.optimizer.publish()
