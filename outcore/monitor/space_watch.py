"""SpaceWatch: is there still room on the drives that the run writes to? Cheap enough for every step.

A statvfs per drive (about 10 us) against a reserve. Below twice the reserve the verdict is "low" (warn), below the
reserve "full" (save and stop). Where a drive cannot be asked the verdict is "unknown" with the reason, not a stop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from outcore.monitor.block_device import nearest_existing
from outcore.monitor.drive_sensor import free_bytes
from outcore.monitor.sensor import describe
from outcore.units import format_gb

LOW_FACTOR = 2.0
LEVELS = ("ok", "unknown", "low", "full")
"""From best to worst."""


@dataclass(frozen=True)
class Verdict:
    """The answer of a watch."""

    level: str
    """One of LEVELS."""
    words: str
    """What, how much of how much, and what to do; for people."""
    path: Path | None = None
    """The drive's path that it speaks of (None: RAM)."""
    free_bytes: int | None = None
    reserve_bytes: int = 0

    @property
    def must_stop(self) -> bool:
        """True when the run should save and stop now."""
        return self.level == "full"


class SpaceWatch:
    """Watches the free space under `paths` (paths on one drive are asked once).

    Args:
        paths: folders that the run writes to (offload, checkpoints, logs); they need not exist yet.
        reserve_bytes: free bytes below which the run must stop: at least what the next save writes.
        ask: returns the free bytes of a path; tests replace it.

    Raises:
        ValueError: no path, or a negative reserve.
    """

    def __init__(
        self,
        paths: Iterable[Path | str],
        reserve_bytes: int,
        *,
        ask: Callable[[Path], int] = free_bytes,
    ) -> None:
        if reserve_bytes < 0:
            raise ValueError(f"The space reserve cannot be negative, got {reserve_bytes} bytes.")
        by_drive: dict[int, Path] = {}
        for path in paths:
            by_drive.setdefault(os.stat(nearest_existing(path)).st_dev, Path(path))
        if not by_drive:
            raise ValueError("SpaceWatch needs at least one path to watch.")
        self.paths = tuple(by_drive.values())
        """One path for each drive."""
        self.reserve_bytes = reserve_bytes
        self._ask = ask

    def check(self) -> Verdict:
        """The verdict on the drive that is worst off."""
        return max((self._check(path) for path in self.paths), key=lambda verdict: LEVELS.index(verdict.level))

    def _check(self, path: Path) -> Verdict:
        reserve_bytes = self.reserve_bytes
        try:
            free = self._ask(path)
        except OSError as error:
            words = f"Free space under {path} cannot be read ({describe(error)}): is the drive still there?"
            return Verdict("unknown", words, path, None, reserve_bytes)
        amounts = f"{format_gb(free)} free under {path}, reserve {format_gb(reserve_bytes)}"
        if free < reserve_bytes:
            words = f"The drive is nearly full: {amounts}. "
            words += "Free some space or move the folder to another drive, then resume."
            return Verdict("full", words, path, free, reserve_bytes)
        if free < LOW_FACTOR * reserve_bytes:
            words = f"Space is running out: {amounts}. "
            words += "The run saves and stops when the reserve is reached: free some space."
            return Verdict("low", words, path, free, reserve_bytes)
        return Verdict("ok", amounts, path, free, reserve_bytes)
