"""SpaceWatch: is there still room on the drives that the run writes to? Cheap enough for every step.

A statvfs per drive (about 10 us) against a reserve: what the run may still have to write there. Below twice the reserve
the verdict is "low" (warn), below the reserve "full" (save and stop). Where a drive cannot be asked the verdict is
"unknown" with the reason, not a stop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outcore.common.files import nearest_existing
from outcore.common.quantities import format_gb
from outcore.monitor.sensors import describe
from outcore.monitor.sensors.drive import free_bytes

LOW_FACTOR = 2.0
LEVELS = ("ok", "unknown", "low", "full")
"""From best to worst."""


@dataclass(frozen=True)
class SpaceVerdict:
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
    """Watches the free space under folders.

    Args:
        reserves: of each folder that the run writes to (offload, checkpoints, logs), which need not exist yet: free
            bytes below which the run must stop, at least what it may still write there at once. Of folders on one drive
            the one with the largest reserve is asked.
        ask: returns the free bytes of a path; tests replace it.

    Raises:
        ValueError: no folder, or a negative reserve."""

    def __init__(self, reserves: Mapping[Path, int], *, ask: Callable[[Path], int] = free_bytes) -> None:
        if not reserves:
            raise ValueError("SpaceWatch needs at least one path to watch.")
        by_drive: dict[int, Path] = {}
        for path, reserve_bytes in reserves.items():
            if reserve_bytes < 0:
                raise ValueError(f"The space reserve cannot be negative, got {reserve_bytes} bytes.")
            drive = os.stat(nearest_existing(path)).st_dev
            if drive not in by_drive or reserves[by_drive[drive]] < reserve_bytes:
                by_drive[drive] = path
        self.reserves = {path: reserves[path] for path in by_drive.values()}
        """One folder for each drive."""
        self._ask = ask

    def check(self) -> SpaceVerdict:
        """The verdict on the drive that is worst off."""
        return max((self._check(path) for path in self.reserves), key=lambda verdict: LEVELS.index(verdict.level))

    def _check(self, path: Path) -> SpaceVerdict:
        reserve_bytes = self.reserves[path]
        try:
            free = self._ask(path)
        except OSError as error:
            words = f"Free space under {path} cannot be read ({describe(error)}): is the drive still there?"
            return SpaceVerdict("unknown", words, path, None, reserve_bytes)
        amounts = f"{format_gb(free)} free under {path}, reserve {format_gb(reserve_bytes)}"
        if free < reserve_bytes:
            words = f"The drive is nearly full: {amounts}. "
            words += "Free some space or move the folder to another drive, then resume."
            return SpaceVerdict("full", words, path, free, reserve_bytes)
        if free < LOW_FACTOR * reserve_bytes:
            words = f"Space is running out: {amounts}. "
            words += "The run saves and stops when the reserve is reached: free some space."
            return SpaceVerdict("low", words, path, free, reserve_bytes)
        return SpaceVerdict("ok", amounts, path, free, reserve_bytes)
