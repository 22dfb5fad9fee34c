"""What a lane did and where its time went."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from outcore.staging.lanes.copy_streams import CopyEvent


@dataclass(frozen=True)
class LaneStats:
    """Totals since the lane was opened; subtract two to get an interval."""

    transfers: int = 0
    """Transfers that ended well."""
    failed: int = 0
    n_bytes: int = 0
    """Bytes of the transfers that ended well."""
    chunks: int = 0
    io_busy_s: float = 0.0
    """Time with at least one read or write (or copy between RAM and a slot) under way."""
    copy_busy_s: float = 0.0
    """Time the device spent on the lane's copies, from its own events."""
    slot_wait_s: float = 0.0
    """Time with a chunk ready and every slot taken: normal for the faster end of a lane that is kept busy."""
    host_wait_s: float = 0.0
    """Time callers were blocked in `wait` and `wait_stream`: what the lane cost the program."""

    def __sub__(self, earlier: LaneStats) -> LaneStats:
        return LaneStats(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(LaneStats)})


class LaneClock:
    """Collects `LaneStats`; safe from any thread.

    `on_copy(label, n_bytes, copy)`, when set, hears of every copy that has ended, on the lane's thread (for a trace).
    """

    def __init__(self) -> None:
        self.on_copy: Callable[[str, int, CopyEvent], object] | None = None
        self._lock = threading.Lock()
        self._totals: dict[str, Any] = {f.name: f.default for f in fields(LaneStats)}
        self._io_count = 0
        self._since_s: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        """Adds to the named totals."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount

    def copied(self, label: str, n_bytes: int, copy: CopyEvent) -> None:
        """A copy over the link has ended well."""
        self.add(copy_busy_s=copy.copy_s())
        if self.on_copy is not None:
            self.on_copy(label, n_bytes, copy)

    @property
    def io_under_way(self) -> int:
        """Reads and writes (or copies between RAM and a slot) that have begun and not ended."""
        return self._io_count

    def io_begins(self) -> None:
        with self._lock:
            self._io_count += 1
            self._since_s.setdefault("io_busy_s", time.perf_counter())

    def io_ends(self) -> None:
        with self._lock:
            self._io_count -= 1
            if not self._io_count:
                self._stop("io_busy_s")

    def starved(self, starved: bool) -> None:
        """A chunk waits for a slot, or no longer does."""
        with self._lock:
            if starved:
                self._since_s.setdefault("slot_wait_s", time.perf_counter())
            else:
                self._stop("slot_wait_s")

    def _stop(self, name: str) -> None:
        since_s = self._since_s.pop(name, None)
        if since_s is not None:
            self._totals[name] += time.perf_counter() - since_s

    def read(self) -> LaneStats:
        """The totals now, intervals under way included."""
        with self._lock:
            totals = dict(self._totals)
            for name, since_s in self._since_s.items():
                totals[name] += time.perf_counter() - since_s
            return LaneStats(**totals)
