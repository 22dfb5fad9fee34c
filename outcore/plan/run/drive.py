"""What a run takes from the machine profile while it is fresh: rates of the drive behind a folder (else measured), and
whether write-combined memory is worth it."""

from __future__ import annotations

import time
from pathlib import Path

from outcore.common.files import newest
from outcore.common.quantities import MIB
from outcore.machine import Machine, detect_machine, drive_of
from outcore.machine.offload import slow_drive_warning
from outcore.plan.profile import MEASURED_PROFILE, differs
from outcore.sizing.streaming import NOT_SLOWER_SHARE
from outcore.staging import NvmePerformance, check_nvme_performance, performance

FRESH_S = 30 * 86400.0
"""Age up to which the profile's rates of a drive count as today's."""


def drive_performance(
    folder: str | Path, *, measured: Path = MEASURED_PROFILE, now_s: float | None = None
) -> NvmePerformance:
    """Rates of the drive under `folder`: from the profile where it is at most 30 days old and has this drive, else
    measured now, which writes up to 64 MiB there and takes at most two seconds. OSError: it cannot be written."""
    drive = drive_of(folder)
    profile = _fresh_profile(measured, now_s)
    for known in profile.drives if profile is not None else ():
        if (known.mount_point, known.device) == (drive.mount_point, drive.device):
            read, write = known.read_gb_per_s, known.write_gb_per_s
            if read is not None and write is not None:
                return performance(folder, read, write, [slow_drive_warning(folder, read, write)])
    return check_nvme_performance(folder, test_bytes=64 * MIB, max_s=2.0)


def write_combined_measured(
    *, measured: Path = MEASURED_PROFILE, now_s: float | None = None, here: Machine | None = None
) -> bool | None:
    """Whether write-combined memory measured no slower on this machine; None without a fresh profile that says so."""
    profile = _fresh_profile(measured, now_s)
    share = None if profile is None or profile.links is None else profile.links.write_combined_share
    if profile is None or share is None or differs(here or detect_machine(), profile):
        return None
    return share >= NOT_SLOWER_SHARE


def _fresh_profile(measured: Path, now_s: float | None) -> Machine | None:
    """The profile where it is at most 30 days old and can be read."""
    measured = newest(measured)
    try:
        age_s = (time.time() if now_s is None else now_s) - measured.stat().st_mtime
        return Machine.load(measured) if age_s <= FRESH_S else None
    except (OSError, ValueError):
        return None
