"""Memory of gradients, lent to parameters that live on the drive while no gradient is there.

From an update until a share's next gradient comes, the memory of its gradient has nothing to hold. The update leaves
the new parameters there too, so forward and backward of the first micro-batch of a step, and evaluations, find them in
RAM: with one micro-batch to a step nothing is read from the drive in a pass. It costs no memory, and a copy of 2 B per
parameter in RAM. What DeepSpeed sees is a share that is available; it is the same on every rank at every point of a
step, so ranks gather in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from outcore.engine.deepspeed.environment import accelerator


class Loans:
    """`mark_absent(param)`: the share is on the drive alone from now on."""

    def __init__(self, mark_absent: Callable[[Any], None]) -> None:
        self._mark_absent = mark_absent
        self._lent: dict[int, tuple[Any, torch.Tensor]] = {}

    def __contains__(self, ds_id: int) -> bool:
        return ds_id in self._lent

    def memory_of(self, ds_id: int) -> torch.Tensor:
        """What is lent to a share, with what it holds."""
        return self._lent[ds_id][1]

    def lend(self, param: Any, memory: torch.Tensor) -> None:
        """`memory` holds the rank's share of `param`, padding included, and is DeepSpeed's to read until `reclaim`."""
        self._lent[param.ds_id] = (param, memory)
        param.ds_tensor.data = memory
        param.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    def reclaim(self, param: Any) -> None:
        """Before a gradient is written there. Nothing where no memory is lent."""
        lent = self._lent.pop(param.ds_id, None)
        if lent is None:
            return
        if param.ds_status == ZeroParamStatus.INFLIGHT:  # being gathered for another use of the same weight
            accelerator().synchronize()
        if param.data.untyped_storage().data_ptr() == lent[1].untyped_storage().data_ptr():
            param.data = param.data.clone()  # DeepSpeed on the CPU gathers a single rank's share without a copy
        self._mark_absent(param)

    def reclaim_all(self) -> None:
        """Shares on the drive are about to change, or have changed."""
        for param, _ in list(self._lent.values()):
            self.reclaim(param)

    def clear(self) -> None:
        """At the end."""
        self._lent.clear()
