"""BlockDevice: the kernel's counters of the physical disks under a path.

Which disks those are (through partitions, LVM, LUKS, RAID, btrfs, loop files, containers) is machine.drive_of's answer;
tmpfs, network shares and WSL2's Windows drives have none. Counters are those of whole disks, all processes included:
what the drives really move and wear. Cost: one read of /sys/block/<disk>/stat (about 20 us) per disk and look."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outcore.machine import drive_of

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
