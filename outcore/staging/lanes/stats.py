"""What others may see of a lane while it works."""

from __future__ import annotations

from collections.abc import Callable

from outcore.staging.lanes.copy_streams import CopyEvent


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
