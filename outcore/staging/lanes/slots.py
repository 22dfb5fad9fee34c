"""The slots of a lane: where the next chunk goes, and when a slot is free again.

A slot takes chunks one behind the other until the next one does not fit (so that many small tensors share one) and
starts over when all of them have left. A chunk is placed at the same position modulo 4 KiB as in its file, so that
direct I/O moves everything but the ragged ends straight into the slot. Used by one thread only.

`Gate`: device memory that is promised to a transfer before it is known when it will be free.

A lane reads ahead for a gated transfer into its slots, as far as they reach, and copies to the device only once the
gate has been opened. This is how a drive stays busy although the device has room for two or three layers: the reads for
the layers behind them wait in pinned memory, where they are in order of need.

What others may see of a lane while it works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outcore.staging.lanes.copy_streams import CopyEvent
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


class Gate:
    """For `after=` of a lane's file and store transfers. Settled once: opened, or cancelled. Thread-safe.

    The first gate in a lane must be opened without waiting for any transfer behind it in the same lane, because slots
    filled for it are free again only then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settled = False
        self._callbacks: list[Callable[[], object]] = []
        self.after: Any = None
        """The event that the first copy waits for; None: nothing."""
        self.error: BaseException | None = None

    @property
    def is_settled(self) -> bool:
        return self._settled

    def open(self, after: Any = None) -> None:
        """Copies may go, once the event `after` has passed (None: at once)."""
        self._settle(after, None)

    def cancel(self, error: BaseException) -> None:
        """The transfer fails with `error`, and reads nothing more. After `open` it does nothing."""
        self._settle(None, error)

    def when_settled(self, fn: Callable[[], object]) -> None:
        """Calls `fn()` when it is settled, on the thread that does it, or now."""
        with self._lock:
            if not self._settled:
                self._callbacks.append(fn)
                return
        fn()

    def _settle(self, after: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._settled:
                return
            self.after, self.error, self._settled = after, error, True
            callbacks, self._callbacks = self._callbacks, []
        for fn in callbacks:
            fn()


class LaneClock:
    """Written by the lane's thread alone.

    `on_copy(label, n_bytes, copy)`, when set, hears of every copy that has ended, on the lane's thread (for a trace).
    """

    def __init__(self) -> None:
        self.on_copy: Callable[[str, int, CopyEvent], object] | None = None
        self.io_under_way = 0
        """Reads and writes (or copies between RAM and a slot) that have begun and not ended."""

    def copied(self, label: str, n_bytes: int, copy: CopyEvent) -> None:
        """A copy over the link has ended well."""
        if self.on_copy is not None:
            self.on_copy(label, n_bytes, copy)
