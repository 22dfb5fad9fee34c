"""How much RAM may be pinned without starving the machine: what is available, less a reserve.

Looks at the kernel's MemAvailable and at the memory limit of the control group (containers, WSL2 distributions under
systemd, SLURM jobs), whichever is less. Pinned pages can be neither swapped nor reclaimed, so a reserve stays free.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from outcore.units import GIB

RESERVE_FRACTION = 0.05
"""Part of the total RAM that the pool leaves free at least: page tables, page cache and the desktop need it."""
MIN_RESERVE_BYTES = 1 * GIB


def available_ram_bytes(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """RAM that can be taken now: MemAvailable, or less where a control group allows less."""
    available_bytes = int(psutil.virtual_memory().available)
    left_bytes = cgroup_left_bytes(cgroup_root)
    return available_bytes if left_bytes is None else min(available_bytes, left_bytes)


def cgroup_left_bytes(cgroup_root: Path) -> int | None:
    """Bytes left under the control group's limit (version 2, or 1 in `memory/`); None when there is no limit."""
    for limit_name, usage_name, stat_name in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            limit_text = (cgroup_root / limit_name).read_text().strip()
            usage_bytes = int((cgroup_root / usage_name).read_text())
        except (OSError, ValueError):
            continue
        if limit_text == "max" or int(limit_text) >= 1 << 60:
            return None
        return max(0, int(limit_text) - usage_bytes + _reclaimable_bytes(cgroup_root / stat_name))
    return None


def _reclaimable_bytes(stat: Path) -> int:
    """Page cache that the kernel drops before it refuses memory: counted as used, but free for the asking."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines() if len(line.split()) == 2)
        return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
    except (OSError, ValueError):
        return 0


def reserve_bytes() -> int:
    """RAM the pool leaves free: 5 % of the total, at least 1 GiB."""
    return max(MIN_RESERVE_BYTES, int(psutil.virtual_memory().total * RESERVE_FRACTION))
