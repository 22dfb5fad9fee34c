"""What the staged engine opens before the model is made and closes after DeepSpeed: memory, files, the swapper."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outcore.common.deadline import Deadline
from outcore.engine.deepspeed.staged.memory import StagedMemory
from outcore.engine.deepspeed.staged.plan import StagedPlan
from outcore.flow.weights import Scratch
from outcore.storage import StorageEngine, TensorSpec

if TYPE_CHECKING:
    from outcore.engine.deepspeed.staged.gradients import StagedGradients
    from outcore.engine.deepspeed.staged.params import StagedParams


class StagedSession:
    """One rank's. `engine`: whose threads move bytes; None opens one where a drive is used.

    Every rank has a folder of its own below `plan.nvme_path`. EngineError when it cannot be used or is too full.
    """

    def __init__(self, plan: StagedPlan, device: torch.device, rank: int, engine: StorageEngine | None = None) -> None:
        self.plan = plan
        self.scratch: Scratch | None = None
        self.params: StagedParams | None = None
        self.gradients: StagedGradients | None = None
        self.memory = StagedMemory(
            device,
            home_bytes=plan.home_bytes,
            staging_bytes=plan.staging_bytes,
            pin=plan.pin,
            lane_bytes=plan.grad_staging_bytes,
        )
        try:
            if plan.nvme_path is not None:
                self.scratch = Scratch(
                    [Path(plan.nvme_path) / f"rank{rank}"], engine, plan.nvme_checksums, storage=plan.storage
                )
            if plan.grad_staging_bytes:
                self.gradients = self._open_gradients(device)
            if plan.param_store_bytes:
                self.params = self._open_params()
        except BaseException:
            self.close()
            raise

    def _open_params(self) -> StagedParams:
        from outcore.engine.deepspeed.staged.param_store import STORE_NAME
        from outcore.engine.deepspeed.staged.params import StagedParams

        assert self.scratch is not None and self.memory.pool is not None
        dtype = self.plan.dtype
        spec = TensorSpec(STORE_NAME, dtype, (self.plan.param_store_bytes // dtype.itemsize,))
        return StagedParams(
            self.scratch.store("parameters", [spec]),
            self.memory.pool,
            ahead_bytes=self.plan.ahead_bytes,
            element_bytes=dtype.itemsize,
            world_size=torch.distributed.get_world_size(),
        )

    def _open_gradients(self, device: torch.device) -> StagedGradients:
        from outcore.engine.deepspeed.staged.gradients import StagedGradients

        assert self.scratch is not None and self.memory.pool is not None
        return StagedGradients(self.memory.pool, device)

    def close(self, deadline: Deadline | None = None, *, is_idle: bool = True) -> None:
        """Wait for transfers, give memory back, remove the scratch files; safe to call twice.

        Where a transfer does not end within the limit, its memory and the scratch files stay until the process ends.
        """
        deadline = deadline or Deadline()
        if self.gradients is not None:
            is_idle = self.gradients.close(deadline) and is_idle
        if self.params is not None:
            is_idle = self.params.close(deadline) and is_idle
        if self.scratch is not None:
            if self.scratch.close(deadline.left_s()):
                self._remove_empty_folders()
            else:
                is_idle = False
        if is_idle:
            self.memory.close()
        else:
            self.memory.leave()

    def _remove_empty_folders(self) -> None:
        """The rank's, and the run's own: the last rank finds that one empty. What others put there stays."""
        assert self.scratch is not None and self.plan.nvme_path is not None
        rank_folder = self.scratch.folders[0].parent
        with suppress(OSError):  # not empty, or gone already
            rank_folder.rmdir()
            if self.plan.owns_nvme_path:
                rank_folder.parent.rmdir()
