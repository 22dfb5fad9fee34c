"""DriveSensor: bytes moved, queue depth, free space and temperature of the drives under one path.

Counters come from BlockDevice, temperature from hwmon (below /sys/class/nvme, or drivetemp for SATA), free space from
statvfs. Cost: counters and free space about 30 us a look; temperature asks the drive itself, so every 5 s.

BlockDevice: the kernel's counters of the physical disks under a path.

Which disks those are (through partitions, LVM, LUKS, RAID, btrfs, loop files, containers) is machine.drive_of's answer;
tmpfs, network shares and WSL2's Windows drives have none. Counters are those of whole disks, all processes included:
what the drives really move and wear. Cost: one read of /sys/block/<disk>/stat (about 20 us) per disk and look."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from outcore.common.files import nearest_existing
from outcore.machine import drive_of
from outcore.monitor.sensors.host import SensorBoard, describe

SECTOR_BYTES = 512  # the unit of /sys/block/*/stat whatever the drive's own sector (kernel: Documentation/block/stat)


@dataclass(frozen=True)
class BlockCounters:
    """Sums over the disks since boot (time in milliseconds, as the kernel counts it)."""

    read_bytes: int
    write_bytes: int
    in_flight: int
    queue_ms: int
    """Milliseconds that requests spent in the queue, summed over requests: its growth per ms is the mean depth."""


class BlockDevice:
    """The disks under `path` (which need not exist yet).

    Args:
        root: where `sys` and `proc` are looked for; tests replace it.

    Raises:
        OSError: the path has no block device; the message says what it lies on instead."""

    def __init__(self, path: Path | str, root: Path | str = "/") -> None:
        drive = drive_of(path, sys_root=root)
        self.disks: tuple[str, ...] = drive.disks
        """Kernel names, e.g. ("nvme0n1",)."""
        self._stat_paths = [Path(root) / "sys" / "block" / disk / "stat" for disk in drive.disks]
        if not self.disks:
            raise OSError(drive.reason)

    def read(self) -> BlockCounters:
        """The counters now.

        Raises:
            OSError: a disk has vanished."""
        read_sectors = write_sectors = in_flight = queue_ms = 0
        for path in self._stat_paths:
            fields = path.read_text().split()
            read_sectors += int(fields[2])
            write_sectors += int(fields[6])
            in_flight += int(fields[8])
            queue_ms += int(fields[10])
        return BlockCounters(read_sectors * SECTOR_BYTES, write_sectors * SECTOR_BYTES, in_flight, queue_ms)


TEMPERATURE_INTERVAL_S = 5.0


@dataclass
class DriveSample:
    """Readings of a drive; None where the system does not tell."""

    counters: BlockCounters | None = None
    free_bytes: int | None = None
    temp_c: float | None = None
    """The hottest disk under the path."""


class DriveSensor:
    """The drives under `path` (a folder that may not exist yet; its nearest parent counts).

    Args:
        board: where missing sensors are noted.
        root: where `sys` and `proc` are looked for; tests replace it."""

    def __init__(self, board: SensorBoard, path: Path | str, root: Path | str = "/") -> None:
        self._board = board
        self._path = Path(path)
        self._sys_root = Path(root) / "sys"
        self._temp_at_s = float("-inf")
        self._temp_c: float | None = None
        self.device: BlockDevice | None = None
        try:
            self.device = BlockDevice(path, root)
        except (OSError, ValueError) as error:
            board.switch_off(
                "nvme_counters",
                f"No disk counters for {path} ({describe(error)}): nvme_read_bytes, nvme_write_bytes and nvme_temp_c "
                "are null.",
            )
        self.total_bytes: int | None = board.read(
            "nvme_total_bytes", lambda: shutil.disk_usage(nearest_existing(self._path)).total, what="Drive size"
        )

    @property
    def disks(self) -> tuple[str, ...]:
        return () if self.device is None else self.device.disks

    def read_counters(self) -> BlockCounters | None:
        """The disk counters now; cheap enough for every step."""
        if self.device is None:
            return None
        return self._board.read("nvme_counters", self.device.read, what=f"The counters of {', '.join(self.disks)}")

    def read_free_bytes(self) -> int | None:
        """Free bytes for this user under the path."""
        return self._board.read(
            "nvme_free_bytes", lambda: free_bytes(self._path), what=f"Free space under {self._path}"
        )

    def sample(self) -> DriveSample:
        now_s = time.monotonic()
        if self.device is not None and now_s - self._temp_at_s >= TEMPERATURE_INTERVAL_S:
            self._temp_at_s = now_s
            self._temp_c = self._board.read("nvme_temp_c", self._read_temp, what="The drive's temperature")
        return DriveSample(self.read_counters(), self.read_free_bytes(), self._temp_c)

    def _read_temp(self) -> float:
        temps_c = [_read_hwmon(folder) for disk in self.disks for folder in self._hwmon_of(disk)]
        if not temps_c:
            raise OSError(f"no hwmon sensor for {', '.join(self.disks)}; virtual disks and WSL2 hide it")
        return max(temps_c)

    def _hwmon_of(self, disk: str) -> list[Path]:
        # NVMe controllers carry hwmon themselves or one level down, by kernel version; SATA drives carry drivetemp's.
        roots = [self._sys_root / "class" / "nvme" / name for name in self._controllers_of(disk)]
        roots += [root / "device" for root in roots] + [self._sys_root / "block" / disk / "device"]
        patterns = ("hwmon[0-9]*/temp1_input", "hwmon/hwmon[0-9]*/temp1_input")
        return [found for root in roots for pattern in patterns for found in sorted(root.glob(pattern))]

    def _controllers_of(self, disk: str) -> list[str]:
        """nvme0n1 -> ["nvme0"]; with multipath the name's number is the subsystem's, so its members are listed."""
        match = re.match(r"(nvme\d+)(c\d+)?n\d+$", disk)
        if match is None:
            return []
        device = self._sys_root / "block" / disk / "device"
        members = [entry.name for entry in device.glob("nvme[0-9]*") if re.fullmatch(r"nvme\d+", entry.name)]
        return sorted(members) or [match.group(1)]


def free_bytes(path: Path | str) -> int:
    """Bytes that this user may still write under `path` (or its nearest existing parent)."""
    try:
        return shutil.disk_usage(path).free
    except FileNotFoundError:
        return shutil.disk_usage(nearest_existing(path)).free


def _read_hwmon(path: Path) -> float:
    return int(path.read_text()) / 1e3
