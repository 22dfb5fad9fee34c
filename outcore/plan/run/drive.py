"""How fast is the drive behind a folder: as the profile says while it is fresh, else measured."""

from __future__ import annotations

import time
from pathlib import Path

from outcore.common.quantities import MIB
from outcore.machine import Machine, drive_of
from outcore.machine.offload import slow_drive_warning
from outcore.plan.profile import MEASURED_PROFILE
from outcore.staging import NvmePerformance, check_nvme_performance, performance

FRESH_S = 30 * 86400.0
"""Age up to which the profile's rates of a drive count as today's."""


def drive_performance(
    folder: str | Path, *, measured: Path = MEASURED_PROFILE, now_s: float | None = None
) -> NvmePerformance:
    """Rates of the drive under `folder`: from the profile where it is at most 30 days old and has this drive, else
    measured now, which writes up to 64 MiB there and takes at most two seconds. OSError: it cannot be written."""
    drive = drive_of(folder)
    try:
        age_s = (time.time() if now_s is None else now_s) - measured.stat().st_mtime
        saved = Machine.load(measured).drives if age_s <= FRESH_S else ()
    except (OSError, ValueError):
        saved = ()
    for known in saved:
        if (known.mount_point, known.device) == (drive.mount_point, drive.device):
            read, write = known.read_gb_per_s, known.write_gb_per_s
            if read is not None and write is not None:
                return performance(folder, read, write, [slow_drive_warning(folder, read, write)])
    return check_nvme_performance(folder, test_bytes=64 * MIB, max_s=2.0)
