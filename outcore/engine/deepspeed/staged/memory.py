"""RAM of the staged engine: one pinned pool of exact size for homes and staging, pageable memory beyond it.

DeepSpeed's own pinned buffers are rounded up to powers of two by torch and kept for ever in its cache; the homes of
parameters and gradients here take what they need, to the page.
"""

from __future__ import annotations

import torch

from outcore.common.quantities import format_gib
from outcore.staging import PinnedPool
from outcore.staging.pool import HostMemory


class StagedMemory:
    """`home_bytes` of parameters, pinned where `pin` and the machine allow it, and the staging pool.

    `staging_bytes` of the pool stay free for transfers; 0 where nothing flows. `lane_bytes` are for lanes, which take
    them before any home does. Memory of gradients comes later (`take_gradients`): before parameters moved into their
    homes they are there twice, and pinned memory is real from the start. RuntimeError when the machine gives no staging
    memory at all.
    """

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
        """For people."""
        staging_bytes = self._lane_bytes + (self.pool.free_bytes if self.pool is not None else 0)
        pinned = self.homes.pinned_bytes + self._gradients.pinned_bytes
        pageable = self.homes.pageable_bytes + self._gradients.pageable_bytes
        words = f"{format_gib(pinned + pageable)} of RAM, " + (
            f"{format_gib(pinned)} pinned" if pinned else "not pinned"
        )
        return words + (f", and {format_gib(staging_bytes)} of staging memory" if staging_bytes else "")

    def leave(self) -> None:
        """Instead of `close`, where a transfer does not end: everything stays until the process ends."""
        for pool in (self.pool, self._gradient_pool):
            if pool is not None:
                pool.leave()

    def close(self) -> None:
        """Give everything back; no tensor of it may be used any more."""
        for homes, pool in ((self.homes, self.pool), (self._gradients, self._gradient_pool)):
            homes.close()
            if pool is not None:
                pool.close()
