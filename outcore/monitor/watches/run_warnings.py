"""RunWarnings: what goes wrong around a run, said once each with advice.

Looks at the metrics line of each step: throttling, a PCIe link below its maximum, swap, space, drive stalls, a drive
slower than measured, a hot drive, mains power lost. A state must last some steps before it is said, so that one odd
reading says nothing. How long a step waits for the drive is not judged by the run's first step: it compiles, and no
update of a step before it is on its way. Cost: some comparisons a step; the battery is asked every 30 s (about 50 us).

SpaceWatch: is there still room on the drives that the run writes to? Cheap enough for every step.

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
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.common.files import nearest_existing
from outcore.common.quantities import GB, GIB, MIB, format_gb, format_gib
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
    """Text for people: what, how much of how much, and what to do."""
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


WINDOW_STEPS = 10
STALL_NVME_FRACTION = 0.25
SLOW_DRIVE_FRACTION = 0.6
HOT_DRIVE_C = 75.0  # most NVMe drives begin to slow down between 75 and 85 degrees
OWN_SWAP_BYTES = 64 * MIB
SWAP_GROWTH_BYTES = 512 * MIB
BATTERY_INTERVAL_S = 30.0
_THERMAL = {"thermal (software)", "thermal (hardware)", "hardware slowdown"}


class RunWarnings:
    """Collects the states of a run and hands out each warning once.

    Args:
        describe_machine: returns `Sampler.describe()` (its GPU part comes with the first sample).
        drive_gb_per_s: what the drive did when it was measured (reads and writes together), None if never measured.
        battery: psutil.sensors_battery, or a fake; None: psutil's.
        clock: seconds, monotonic."""

    def __init__(
        self,
        describe_machine: Callable[[], dict[str, Any]] = dict,
        *,
        drive_gb_per_s: float | None = None,
        battery: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._describe_machine = describe_machine
        self._drive_gb_per_s = drive_gb_per_s
        self._battery = battery
        self._clock = clock
        self._ask_battery_at_s = float("-inf")
        self._recent: deque[dict[str, Any]] = deque(maxlen=WINDOW_STEPS)
        self._settled: deque[dict[str, Any]] = deque(maxlen=WINDOW_STEPS)
        """Steps as in `_recent`, but never the first step that this process made."""
        self._first_swap_bytes: int | None = None
        self._said: set[str] = set()

    def check(self, record: dict[str, Any], verdicts: Iterable[SpaceVerdict] = ()) -> list[str]:
        """The warnings that this step adds; each comes once in a run.

        Args:
            record: the step's metrics line.
            verdicts: of SpaceWatch and MemoryWatch; those not "ok" are warned about."""
        if self._recent:
            self._settled.append(record)
        self._recent.append(record)
        found: dict[str, str | None] = {
            "thermal": self._thermal(),
            "power": self._power(),
            "brake": self._brake(),
            "link": self._link(),
            "swap": self._swap(record),
            "stall": self._stall(),
            "slow drive": self._slow_drive(),
            "hot drive": self._hot_drive(),
            "battery": self._mains(),
        }
        for verdict in verdicts:
            if verdict.level != "ok":
                found[f"{verdict.level} {verdict.path}"] = verdict.words
        new = {key: words for key, words in found.items() if words and key not in self._said}
        self._said |= set(new)
        return [words for words in new.values() if words]

    def _share(self, holds: Callable[[dict[str, Any]], bool]) -> float:
        """The share of the last WINDOW_STEPS steps for which `holds`; 0 until half of them are there."""
        if len(self._recent) < WINDOW_STEPS // 2:
            return 0.0
        return sum(map(holds, self._recent)) / len(self._recent)

    def _thermal(self) -> str | None:
        if self._share(lambda record: bool(_THERMAL & set(record.get("throttle") or ()))) < 0.3:
            return None
        temps = [record["gpu_temp_c"] for record in self._recent if record.get("gpu_temp_c") is not None]
        at = f" at {max(temps):.0f} °C" if temps else ""
        return (
            f"The GPU slows itself down because it is hot{at}: raise the laptop's rear edge, clean the fans, choose "
            "the maker's performance fan profile, or lower the power limit (nvidia-smi -pl)."
        )

    def _power(self) -> str | None:
        if self._share(lambda record: "power cap" in (record.get("throttle") or ())) < 0.8:
            return None
        limit_w = self._describe_machine().get("gpu_power_limit_w")
        at = f" ({limit_w:.0f} W)" if limit_w else ""
        return (
            f"The GPU runs at its power limit{at}: normal under full load; if the limit is below the maker's figure, "
            "plug in the maker's own charger and choose the performance power mode."
        )

    def _brake(self) -> str | None:
        if self._share(lambda record: "power brake" in (record.get("throttle") or ())) < 0.3:
            return None
        return "The power supply tells the GPU to slow down (power brake): use a stronger charger or supply."

    def _link(self) -> str | None:
        facts = self._describe_machine()
        gen_max, width_max = facts.get("pcie_gen_max"), facts.get("pcie_width_max")

        def is_low(record: dict[str, Any]) -> bool:
            # An idle GPU lowers its link to save power; only a busy one tells.
            busy = (record.get("gpu_util_pct") or 0) >= 30 or (record.get("pcie_rx_gb_per_s") or 0) >= 1
            return busy and (
                _is_below(record.get("pcie_gen"), gen_max) or _is_below(record.get("pcie_width"), width_max)
            )

        if self._share(is_low) < 0.6:
            return None
        low = next(record for record in reversed(self._recent) if is_low(record))
        return (
            f"The PCIe link works as gen {low.get('pcie_gen')} x{low.get('pcie_width')}, though gen {gen_max} "
            f"x{width_max} is possible here: offloading slows down by as much. Switch off PCIe power saving (Windows "
            "power plan, or pcie_aspm.policy=performance), update the BIOS; in a desktop, seat the card in its "
            "full slot."
        )

    def _swap(self, record: dict[str, Any]) -> str | None:
        swap_bytes, own_bytes = record.get("swap_used_bytes"), record.get("own_swap_bytes") or 0
        if self._first_swap_bytes is None:
            self._first_swap_bytes = swap_bytes
        grown_bytes = 0 if swap_bytes is None else swap_bytes - (self._first_swap_bytes or 0)
        if own_bytes < OWN_SWAP_BYTES and grown_bytes < SWAP_GROWTH_BYTES:
            return None
        amounts = f"{format_gib(max(own_bytes, swap_bytes or 0))}, {format_gib(own_bytes)} of it this run's"
        return (
            f"Swap is in use ({amounts}): steps get much slower. Close other programs, or keep less in RAM "
            "(--zero_stage infinity with --nvme_offload_path)."
        )

    def _stall(self) -> str | None:
        share = self._drive_share()
        if share is None or share <= STALL_NVME_FRACTION:
            return None
        return (
            f"The GPU waits for the drive {share * 100:.0f} % of each step: use a larger batch (more gradient "
            "accumulation moves the same bytes for more tokens), keep more in RAM, or use compact optimizer states."
        )

    def _slow_drive(self) -> str | None:
        if self._drive_gb_per_s is None or (self._drive_share() or 0) < 0.5:
            return None
        moved = sum(
            (record.get("nvme_read_bytes") or 0) + (record.get("nvme_write_bytes") or 0) for record in self._settled
        )
        seconds = sum(record.get("step_s") or 0 for record in self._settled)
        rate = moved / seconds / GB if seconds else 0.0
        if rate >= SLOW_DRIVE_FRACTION * self._drive_gb_per_s:
            return None
        return (
            f"The drive moves {rate:.1f} GB/s while the GPU waits for it; it did {self._drive_gb_per_s:.1f} GB/s when "
            "measured. It may be hot, nearly full, busy with another program, or out of write cache: see "
            "`outcore watch`."
        )

    def _hot_drive(self) -> str | None:
        if self._share(lambda record: (record.get("nvme_temp_c") or 0) >= HOT_DRIVE_C) < 0.5:
            return None
        hottest = max(record.get("nvme_temp_c") or 0 for record in self._recent)
        return f"The drive is at {hottest:.0f} °C and will slow down soon: give it a heat sink or more air."

    def _drive_share(self) -> float | None:
        """Share of the settled steps' time that waited for the drive; None until half the window is there."""
        told = [((record.get("phase_s") or {}).get("stall_nvme"), record.get("step_s")) for record in self._settled]
        known = [(spent_s, step_s) for spent_s, step_s in told if step_s and spent_s is not None]
        if len(known) < WINDOW_STEPS // 2:
            return None
        return sum(spent_s for spent_s, _ in known) / sum(step_s for _, step_s in known)

    def _mains(self) -> str | None:
        now_s = self._clock()
        if "battery" in self._said or now_s < self._ask_battery_at_s:
            return None
        self._ask_battery_at_s = now_s + BATTERY_INTERVAL_S
        try:
            if self._battery is None:
                import psutil

                # psutil has no such function on systems without any battery interface.
                self._battery = getattr(psutil, "sensors_battery", lambda: None)
            state = self._battery()
        except Exception as error:  # odd firmware makes psutil raise; then this is simply not known
            return f"Whether mains power is there cannot be read ({describe(error)}); it is not watched."
        if state is None or state.power_plugged is not False:
            return None
        return (
            f"The machine runs on its battery ({state.percent:.0f} % left): the GPU gets a fraction of its power, and "
            "the run ends when the battery does. Plug in the charger."
        )


def _is_below(value: int | None, maximum: int | None) -> bool:
    return value is not None and maximum is not None and value < maximum
