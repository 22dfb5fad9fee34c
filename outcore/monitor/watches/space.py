"""SpaceWatch: is there still room on the drives that the run writes to? Cheap enough for every step.

A statvfs per drive (about 10 us) against a reserve: what the run may still have to write there. Below twice the reserve
the verdict is "low" (warn), below the reserve "full" (save and stop). Where a drive cannot be asked the verdict is
"unknown" with the reason, not a stop.

MemoryWatch: is RAM nearly exhausted, is the run being swapped out?

A look takes about 0.2 ms; within half a second the last verdict is given again, so it may be asked at every step.

Available RAM is the kernel's own estimate (page cache that can be dropped counts as available), or what a container's
limit leaves. Below the reserve the verdict is "full" (save and stop before the kernel kills the run); below twice the
reserve, or with the run's own pages in swap, it is "low"."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outcore.common.files import nearest_existing
from outcore.common.quantities import GIB, MIB, format_gb, format_gib
from outcore.machine import detect_ram
from outcore.monitor.sensors import SensorBoard, describe
from outcore.monitor.sensors.drive import free_bytes
from outcore.monitor.sensors.host import HostSensor

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


MAX_DEFAULT_RESERVE_BYTES = 1 * GIB
INTERVAL_S = 0.5
SWAPPED_BYTES = 64 * MIB
"""Pages of the run in swap below this are start-up code that nobody misses."""


class MemoryWatch:
    """Watches the machine's RAM and this process's swap.

    Args:
        reserve_bytes: available RAM below which the run must stop; default: 3 % of RAM, at most 1 GiB.
        root: where `proc` and `sys` are looked for; tests replace it.
        interval_s: the age up to which a verdict is given again.

    Raises:
        ValueError: a negative reserve."""

    def __init__(
        self, reserve_bytes: int | None = None, *, root: Path | str = "/", interval_s: float = INTERVAL_S
    ) -> None:
        if reserve_bytes is not None and reserve_bytes < 0:
            raise ValueError(f"The RAM reserve cannot be negative, got {reserve_bytes} bytes.")
        self._board = SensorBoard()
        self._host = HostSensor(self._board, root)
        self._root = Path(root)
        self._interval_s = interval_s
        self._looked_at_s = float("-inf")
        self._verdict: SpaceVerdict | None = None
        total_bytes = self._host.ram_total_bytes or 0
        default_bytes = min(MAX_DEFAULT_RESERVE_BYTES, total_bytes * 3 // 100)
        self.reserve_bytes = default_bytes if reserve_bytes is None else reserve_bytes

    def check(self) -> SpaceVerdict:
        """The verdict; "unknown" where the system does not tell."""
        now_s = time.monotonic()
        if self._verdict is None or now_s - self._looked_at_s >= self._interval_s:
            self._looked_at_s = now_s
            self._verdict = self._look()
        return self._verdict

    def _look(self) -> SpaceVerdict:
        ram = self._board.read("ram", lambda: detect_ram(self._root), what="RAM")
        if ram is None or not ram.total_bytes:
            reason = " ".join(self._board.explanations()) or "this system does not tell how much RAM there is."
            return SpaceVerdict("unknown", f"RAM is not watched: {reason}")
        swapped_bytes = self._host.read_own_swap_bytes() or 0
        words = f"RAM: {format_gib(ram.available_bytes)} of {format_gib(ram.total_bytes)} left"
        words += f", {format_gib(swapped_bytes)} of the run in swap" if swapped_bytes >= SWAPPED_BYTES else ""
        level = "ok"
        if ram.available_bytes < self.reserve_bytes:
            level = "full"
            words += f"; below {format_gib(self.reserve_bytes)} the system may kill the run."
        elif ram.available_bytes < LOW_FACTOR * self.reserve_bytes:
            level = "low"
            words += f"; the run saves and stops below {format_gib(self.reserve_bytes)}. Close other programs."
        elif swapped_bytes >= SWAPPED_BYTES:
            level = "low"
            words += "; every swapped page costs a drive access. Close other programs or keep less in RAM."
        return SpaceVerdict(level, words, None, ram.available_bytes, self.reserve_bytes)
