"""RAM of the staged engine: one pinned pool of exact size for homes and staging, pageable memory beyond it.

DeepSpeed's own pinned buffers are rounded up to powers of two by torch and kept for ever in its cache; the homes of
parameters and gradients here take what they need, to the page.
"""

from __future__ import annotations

import torch

from outcore.engine.stream.host_memory import HostMemory
from outcore.staging import PinnedPool
from outcore.units import format_gib


class StagedMemory:
    """`home_bytes` of parameters and gradients, pinned where `pin` and the machine allow it, and the staging pool.

    `staging_bytes` of the pool stay free for transfers; 0 where nothing flows. `lane_bytes` are for lanes, which take
    them before any home does. RuntimeError when the machine gives no staging memory at all.
    """

    def __init__(
        self, device: torch.device, *, home_bytes: int, staging_bytes: int, pin: bool, lane_bytes: int = 0
    ) -> None:
        pinned_homes = home_bytes if pin and device.type == "cuda" else 0
        capacity_bytes = pinned_homes + staging_bytes + lane_bytes
        self._lane_bytes = lane_bytes
        self.pool = PinnedPool(capacity_bytes, device=device) if capacity_bytes else None
        self.homes = HostMemory(self.pool if pinned_homes else None, reserve_bytes=staging_bytes)

    def words(self) -> str:
        """For people."""
        staging_bytes = self._lane_bytes + (self.pool.free_bytes if self.pool is not None else 0)
        pinned, pageable = self.homes.pinned_bytes, self.homes.pageable_bytes
        words = f"{format_gib(pinned + pageable)} of RAM, " + (
            f"{format_gib(pinned)} pinned" if pinned else "not pinned"
        )
        return words + (f", and {format_gib(staging_bytes)} of staging memory" if staging_bytes else "")

    def close(self) -> None:
        """Give everything back; no tensor of it may be used any more."""
        self.homes.close()
        if self.pool is not None:
            self.pool.close()
