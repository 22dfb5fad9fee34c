"""The slots of a lane: where the next chunk goes, and when a slot is free again.

A slot takes chunks one behind the other until the next one does not fit (so that many small tensors share one) and
starts over when all of them have left. A chunk is placed at the same position modulo 4 KiB as in its file, so that
direct I/O moves everything but the ragged ends straight into the slot. Used by one thread only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outcore.staging.lanes.homes import BLOCK_BYTES
from outcore.staging.pool import Lease


@dataclass
class LaneSlot:
    """One lease and how far it is filled."""

    index: int
    lease: Lease
    used_bytes: int = 0
    chunks: int = 0


@dataclass(frozen=True)
class SlotPlace:
    """Place where a chunk sits; `memory` is 1-D uint8 of its exact size."""

    slot: LaneSlot
    memory: torch.Tensor


class SlotRing:
    """Places chunks into slots, oldest free slot first."""

    def __init__(self, leases: list[Lease]) -> None:
        self._slots = [LaneSlot(i, lease) for i, lease in enumerate(leases)]
        self._free = list(self._slots)
        self._open: LaneSlot | None = None
        self.slot_bytes = min(lease.n_bytes for lease in leases)

    def place(self, n_bytes: int, phase_bytes: int) -> SlotPlace | None:
        """A place for `n_bytes` at a position of `phase_bytes` modulo 4 KiB, or None until a slot is free."""
        for slot in (self._open, self._free[0] if self._free else None):
            if slot is None:
                continue
            start_bytes = slot.used_bytes + (phase_bytes - slot.used_bytes) % BLOCK_BYTES
            if start_bytes + n_bytes > slot.lease.n_bytes:
                continue
            if slot is not self._open:
                self._open = self._free.pop(0)
            slot.used_bytes = start_bytes + n_bytes
            slot.chunks += 1
            return SlotPlace(slot, slot.lease.tensor[start_bytes : start_bytes + n_bytes])
        return None

    def leave(self, place: SlotPlace) -> None:
        """The chunk is gone; the last one to leave frees its slot."""
        slot = place.slot
        slot.chunks -= 1
        if slot.chunks == 0:
            slot.used_bytes = 0
            if slot is self._open:
                self._open = None
            self._free.append(slot)
