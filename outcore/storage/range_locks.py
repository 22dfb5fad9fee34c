"""Byte ranges of one file that writers hold: whole-block writers share, a read-modify-write is alone.

A write that covers part of a block must read the block, change some bytes and write it back. While it does so, nobody
else may write the block, or their bytes would be lost. Writers of whole blocks never conflict with each other (what
happens to overlapping bytes is the caller's affair, as with any file). Cost: a scan over the handful of ranges in
flight, about a microsecond.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class RangeLocks:
    """Shared and exclusive locks on [start, end) byte ranges. A thread holds one range at a time: no deadlock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: list[tuple[int, int, bool]] = []

    @contextmanager
    def hold(self, start: int, end: int, *, exclusive: bool) -> Iterator[None]:
        """Hold [start, end) until the block ends; waits for conflicting holders, whose work the kernel ends."""
        mine = (start, end, exclusive)
        with self._changed:
            while self._conflicts(mine):
                self._changed.wait()
            self._held.append(mine)
        try:
            yield
        finally:
            with self._changed:
                self._held.remove(mine)
                self._changed.notify_all()

    def _conflicts(self, mine: tuple[int, int, bool]) -> bool:
        start, end, exclusive = mine
        return any(start < e and s < end and (exclusive or alone) for s, e, alone in self._held)
