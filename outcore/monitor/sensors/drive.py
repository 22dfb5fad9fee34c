"""DriveSensor: bytes moved, queue depth, free space, temperature and lifetime writes of the drives under one path.

Counters come from BlockDevice, temperature from hwmon (below /sys/class/nvme, or drivetemp for SATA), lifetime writes
from `nvme` or `smartctl` where they are installed and allowed (usually only root), free space from statvfs.
Cost: counters and free space about 30 us a look; temperature asks the drive itself, so every 5 s; lifetime writes
start a program, so every 15 min.

BlockDevice: the kernel's counters of the physical disks under a path.

Which disks those are (through partitions, LVM, LUKS, RAID, btrfs, loop files, containers) is machine.drive_of's answer;
tmpfs, network shares and WSL2's Windows drives have none. Counters are those of whole disks, all processes included:
what the drives really move and wear. Cost: one read of /sys/block/<disk>/stat (about 20 us) per disk and look."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
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
LIFETIME_INTERVAL_S = 900.0
NVME_DATA_UNIT_BYTES = 512_000  # NVMe base specification, SMART log: thousands of 512-byte units
_COMMAND_TIMEOUT_S = 10.0


@dataclass
class DriveSample:
    """Readings of a drive; None where the system does not tell."""

    counters: BlockCounters | None = None
    free_bytes: int | None = None
    temp_c: float | None = None
    """The hottest disk under the path."""
    lifetime_written_bytes: int | None = None


class DriveSensor:
    """The drives under `path` (a folder that may not exist yet; its nearest parent counts).

    Args:
        board: where missing sensors are noted.
        root: where `sys` and `proc` are looked for; tests replace it.
        run_command: runs a command and returns its stdout, raising OSError or ValueError; None: subprocess."""

    def __init__(
        self,
        board: SensorBoard,
        path: Path | str,
        root: Path | str = "/",
        run_command: Callable[[Sequence[str]], str] | None = None,
    ) -> None:
        self._board = board
        self._path = Path(path)
        self._sys_root = Path(root) / "sys"
        self._run_command = run_command or run_json_command
        self._temp_at_s = self._lifetime_at_s = float("-inf")
        self._temp_c: float | None = None
        self._lifetime_written_bytes: int | None = None
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
        if self.device is not None and now_s - self._lifetime_at_s >= LIFETIME_INTERVAL_S:
            self._lifetime_at_s = now_s
            self._lifetime_written_bytes = self._board.read(
                "nvme_lifetime_written_bytes", self._read_lifetime, what="The drive's lifetime writes"
            )
        return DriveSample(self.read_counters(), self.read_free_bytes(), self._temp_c, self._lifetime_written_bytes)

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

    def _read_lifetime(self) -> int:
        return sum(self._lifetime_of(disk) for disk in self.disks)

    def _lifetime_of(self, disk: str) -> int:
        if not disk.startswith("nvme"):
            raise OSError(f"{disk} is not an NVMe drive to this system")
        failures = []
        for command, keys in (
            (("nvme", "smart-log", "-o", "json", f"/dev/{disk}"), ("data_units_written",)),
            (("smartctl", "-j", "-A", f"/dev/{disk}"), ("nvme_smart_health_information_log", "data_units_written")),
        ):
            try:
                value = json.loads(self._run_command(command))
                for key in keys:
                    value = value[key]
                return int(value) * NVME_DATA_UNIT_BYTES
            except (OSError, ValueError, KeyError, TypeError) as error:
                failures.append(f"{command[0]}: {describe(error)}")
        raise OSError("; ".join(failures))


def free_bytes(path: Path | str) -> int:
    """Bytes that this user may still write under `path` (or its nearest existing parent)."""
    try:
        return shutil.disk_usage(path).free
    except FileNotFoundError:
        return shutil.disk_usage(nearest_existing(path)).free


def run_json_command(command: Sequence[str]) -> str:
    """stdout of `command`.

    Raises:
        OSError: not installed, timed out, or it failed (usually: only root may ask the drive)."""
    program = shutil.which(
        command[0], path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin" + os.pathsep + "/sbin"
    )
    if program is None:
        raise OSError("not installed")
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"no answer in {_COMMAND_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        text = (done.stderr or done.stdout).strip().splitlines()
        raise OSError(f"exit code {done.returncode}{': ' + text[-1] if text else ''}; it may need root")
    return done.stdout


def _read_hwmon(path: Path) -> float:
    return int(path.read_text()) / 1e3
