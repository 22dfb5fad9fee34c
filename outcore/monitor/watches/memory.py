"""MemoryWatch: is RAM nearly exhausted, is the run being swapped out?

A look takes about 0.2 ms; within half a second the last verdict is given again, so it may be asked at every step.

Available RAM is the kernel's own estimate (page cache that can be dropped counts as available), or what a container's
limit leaves. Below the reserve the verdict is "full" (save and stop before the kernel kills the run); below twice the
reserve, or with the run's own pages in swap, it is "low"."""

from __future__ import annotations

import time
from pathlib import Path

from outcore.common.quantities import GIB, MIB, format_gib
from outcore.machine import detect_ram
from outcore.monitor.sensors import SensorBoard
from outcore.monitor.sensors.host import HostSensor
from outcore.monitor.watches.space import LOW_FACTOR, SpaceVerdict

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
