"""BlockDevice: the physical drives under a path, and their kernel counters.

The path's device number leads to /sys/dev/block; partitions lead to their disk, dm (LVM, LUKS) and md (RAID) devices to
every disk below, loop devices to the drive of their file. File systems without a block device of their own (btrfs,
overlay) are followed through /proc/self/mountinfo; tmpfs, network and WSL2 host folders have no block device.
Counters are those of whole disks: the sum over disks is what the drives really move and wear.
Cost: one read of /sys/block/<disk>/stat (about 20 us) per disk and look.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

SECTOR_BYTES = 512  # the unit of /sys/block/*/stat whatever the drive's own sector (kernel, Documentation/block/stat)
_MAX_DEPTH = 8


@dataclass(frozen=True)
class BlockCounters:
    """Sums over the disks since boot (time in milliseconds, as the kernel counts it)."""

    read_bytes: int
    write_bytes: int
    in_flight: int
    queue_ms: int
    """Milliseconds that requests spent in the queue, summed over requests: its growth per ms is the mean depth."""


class BlockDevice:
    """The disks under `path`.

    Raises:
        OSError: the path has no block device; the message says what it is instead.
    """

    def __init__(self, path: Path | str, sys_root: Path | str = "/sys", proc_root: Path | str = "/proc") -> None:
        self.path = nearest_existing(Path(path))
        self._sys_root = Path(sys_root)
        self._proc_root = Path(proc_root)
        self.disks: tuple[str, ...] = tuple(sorted(self._disks_of_path(self.path, 0)))
        """Kernel names, e.g. ("nvme0n1",)."""

    def read(self) -> BlockCounters:
        """The counters now.

        Raises:
            OSError: a disk has vanished.
        """
        read_sectors = write_sectors = in_flight = queue_ms = 0
        for disk in self.disks:
            fields = (self._sys_root / "block" / disk / "stat").read_text().split()
            read_sectors += int(fields[2])
            write_sectors += int(fields[6])
            in_flight += int(fields[8])
            queue_ms += int(fields[10])
        return BlockCounters(read_sectors * SECTOR_BYTES, write_sectors * SECTOR_BYTES, in_flight, queue_ms)

    def _disks_of_path(self, path: Path, depth: int) -> set[str]:
        if not (self._sys_root / "dev" / "block").is_dir():
            raise OSError(f"{self._sys_root}/dev/block is missing: this system has no Linux block counters")
        number = os.stat(path).st_dev
        node = self._sys_root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
        if node.exists():
            return self._disks_of_node(node.resolve(), depth)
        return self._disks_of_mount(path, depth)

    def _disks_of_node(self, node: Path, depth: int) -> set[str]:
        if depth > _MAX_DEPTH:
            raise OSError(f"{node}: more than {_MAX_DEPTH} block devices on top of each other")
        if (node / "partition").exists():
            node = node.parent
        slaves = node / "slaves"
        below = sorted(slaves.iterdir()) if slaves.is_dir() else []
        if below:
            return set().union(*(self._disks_of_node(slave.resolve(), depth + 1) for slave in below))
        backing = node / "loop" / "backing_file"
        if backing.is_file():
            backing_path = Path(backing.read_text().strip())
            if backing_path.exists():
                return self._disks_of_path(backing_path, depth + 1)
        return {node.name}

    def _disks_of_mount(self, path: Path, depth: int) -> set[str]:
        mount_point, kind, source, options = self._mount_of(path)
        upper = re.search(r"(?:^|,)upperdir=([^,]+)", options)
        if kind == "overlay" and upper and depth <= _MAX_DEPTH and Path(upper.group(1)).exists():
            return self._disks_of_path(Path(upper.group(1)), depth + 1)
        if source.startswith("/dev/"):
            node = self._sys_root / "class" / "block" / Path(os.path.realpath(source)).name
            if node.exists():
                return self._disks_of_node(node.resolve(), depth)
        raise OSError(f"{path} lies on {kind} ({source} at {mount_point}), which has no block device of its own")

    def _mount_of(self, path: Path) -> tuple[str, str, str, str]:
        """(mount point, file system, source, options) of the longest mount point above `path`."""
        real = Path(os.path.realpath(path))
        best: tuple[str, str, str, str] | None = None
        for line in (self._proc_root / "self" / "mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            point = _unescape(left.split()[4])
            kind, source, options = [*right.split(), "", "", ""][:3]
            # Later lines hide earlier ones at the same point.
            if real.is_relative_to(point) and (best is None or len(point) >= len(best[0])):
                best = (point, kind, _unescape(source), _unescape(options))
        if best is None:
            raise OSError(f"{path} is under no mount point of {self._proc_root}/self/mountinfo")
        return best


def nearest_existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists (an offload folder may not be there yet)."""
    path = Path(os.path.abspath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _unescape(text: str) -> str:
    """mountinfo writes space, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)
