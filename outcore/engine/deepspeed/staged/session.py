"""Resources that the staged engine opens before the model is made and closes after DeepSpeed: memory, files, the
swapper.

RAM of the staged engine: one pinned pool of exact size for homes and staging, pageable memory beyond it.

DeepSpeed's own pinned buffers are rounded up to powers of two by torch and kept for ever in its cache; the homes of
parameters and gradients here take what they need, to the page."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outcore.common.deadline import Deadline
from outcore.common.quantities import format_gib
from outcore.engine.deepspeed.staged.plan import StagedPlan
from outcore.flow.weights import Scratch
from outcore.staging import PinnedPool
from outcore.staging.pool import HostMemory
from outcore.storage import StorageEngine, TensorSpec

if TYPE_CHECKING:
    from outcore.engine.deepspeed.staged.gradients import StagedGradients
    from outcore.engine.deepspeed.staged.params import StagedParams


class StagedMemory:
    """`home_bytes` of parameters, pinned where `pin` and the machine allow it, and the staging pool.

    `staging_bytes` of the pool stay free for transfers; 0 where nothing flows. `lane_bytes` are for lanes, which take
    them before any home does. Memory of gradients comes later (`take_gradients`): before parameters moved into their
    homes they are there twice, and pinned memory is real from the start. RuntimeError when the machine gives no staging
    memory at all."""

    def __init__(
        self, device: torch.device, *, home_bytes: int, staging_bytes: int, pin: bool, lane_bytes: int = 0
    ) -> None:
        self._device, self._pins_homes = device, pin and device.type == "cuda"
        pinned_homes = home_bytes if self._pins_homes else 0
        capacity_bytes = pinned_homes + staging_bytes + lane_bytes
        self._lane_bytes = lane_bytes
        self.pool = PinnedPool(capacity_bytes, device=device) if capacity_bytes else None
        self.homes = HostMemory(self.pool if pinned_homes else None, reserve_bytes=staging_bytes)
        self._gradient_pool: PinnedPool | None = None
        self._gradients = HostMemory()

    def take_gradients(self, n_bytes: int) -> torch.Tensor:
        """uint8 [n_bytes] of zeros, once."""
        assert self._gradient_pool is None and not self._gradients.pageable_bytes
        if self._pins_homes and n_bytes:
            self._gradient_pool = PinnedPool(n_bytes, device=self._device)
            self._gradients = HostMemory(self._gradient_pool)
        return self._gradients.take(n_bytes, "gradients")

    @property
    def pinned_bytes(self) -> int:
        """Pinned bytes of the process."""
        return sum(pool.pinned_bytes for pool in (self.pool, self._gradient_pool) if pool is not None)

    def words(self) -> str:
        """Text for people."""
        staging_bytes = self._lane_bytes + (self.pool.free_bytes if self.pool is not None else 0)
        pinned = self.homes.pinned_bytes + self._gradients.pinned_bytes
        pageable = self.homes.pageable_bytes + self._gradients.pageable_bytes
        words = f"{format_gib(pinned + pageable)} of RAM, " + (
            f"{format_gib(pinned)} pinned" if pinned else "not pinned"
        )
        return words + (f", and {format_gib(staging_bytes)} of staging memory" if staging_bytes else "")

    def leave(self) -> None:
        """Keep everything until the process ends, instead of `close`, because a transfer does not end."""
        for pool in (self.pool, self._gradient_pool):
            if pool is not None:
                pool.leave()

    def close(self) -> None:
        """Give everything back; no tensor of it may be used any more."""
        for homes, pool in ((self.homes, self.pool), (self._gradients, self._gradient_pool)):
            homes.close()
            if pool is not None:
                pool.close()


class StagedSession:
    """One rank's. `engine`: whose threads move bytes; None opens one where a drive is used.

    Every rank has a folder of its own below `plan.nvme_path`. EngineError when it cannot be used or is too full."""

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
        """Wait for transfers, release memory, remove the scratch files; safe to call twice. If a transfer does not end
        in time, its memory and the scratch files stay until the process ends."""
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
