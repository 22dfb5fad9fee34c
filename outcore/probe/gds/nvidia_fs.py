"""Reading /proc/driver/nvidia-fs/stats, the counters of the kernel module behind the nvidia-fs path.

The format is documented in NVIDIA's GDS troubleshooting guide ("Displaying GDS NVIDIA FS Driver Statistics"). The trap:
read counters stand still while "IO stats" is disabled, which is the module's default; buffer mappings ("Bar1-map")
are counted always, so they are the second witness."""

from __future__ import annotations

import re
from dataclasses import dataclass

STATS_PATH = "/proc/driver/nvidia-fs/stats"


@dataclass(frozen=True)
class NvidiaFsStats:
    """Counters since the module was loaded; None where the text does not have them."""

    driver_version: str | None
    io_stats_enabled: bool | None
    reads: int | None
    bar1_maps: int | None


def parse_stats(text: str) -> NvidiaFsStats:
    """Reads the text of the stats file."""
    version = re.search(r"NVFS Driver\(version:\s*([\d:.]+)\)", text)
    enabled = re.search(r"^IO stats:\s*(\w+)", text, re.MULTILINE)
    reads = re.search(r"^Reads\s*:\s*n=(\d+)", text, re.MULTILINE)
    maps = re.search(r"^Bar1-map\s*:\s*n=(\d+)", text, re.MULTILINE)
    return NvidiaFsStats(
        driver_version=version.group(1).replace(":", ".") if version else None,
        io_stats_enabled=enabled.group(1).lower() == "enabled" if enabled else None,
        reads=int(reads.group(1)) if reads else None,
        bar1_maps=int(maps.group(1)) if maps else None,
    )


def carried_the_read(before: NvidiaFsStats | None, after: NvidiaFsStats | None) -> bool:
    """Whether the module moved a read between two looks: its reads rose, or (with IO stats off) its mappings did."""
    if before is None or after is None:
        return False
    if after.reads is not None and before.reads is not None and after.reads > before.reads:
        return True
    if after.io_stats_enabled:
        return False
    return after.bar1_maps is not None and before.bar1_maps is not None and after.bar1_maps > before.bar1_maps
