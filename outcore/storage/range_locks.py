"""Byte ranges of one file that writers hold: whole-block writers share, a read-modify-write is alone.

A write that covers part of a block must read the block, change some bytes and write it back. While it does so, nobody
else may write the block, or their bytes would be lost. Writers of whole blocks never conflict with each other (what
happens to overlapping bytes is the caller's affair, as with any file). Cost: a scan over the handful of ranges in
flight, about a microsecond.
"""

from __future__ import annotations

import threading

Held = tuple[int, int, bool]


class RangeLocks:
    """Shared and exclusive locks on [start, end) byte ranges. A thread holds one range at a time: no deadlock."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._held: list[Held] = []

    def take(self, start: int, end: int, *, exclusive: bool) -> Held:
        """Wait for conflicting holders (the kernel ends their work), then hold [start, end) until `give_back`."""
        with self._changed:
            while any(start < e and s < end and (exclusive or alone) for s, e, alone in self._held):
                self._changed.wait()
            mine = (start, end, exclusive)
            self._held.append(mine)
            return mine

    def give_back(self, mine: Held) -> None:
        with self._changed:
            self._held.remove(mine)
            self._changed.notify_all()
