"""Watches during a run: space, memory, sleep, and numbers that deserve a warning."""

from outcore.monitor.watches.run_warnings import (
    HOT_DRIVE_C,
    STALL_NVME_FRACTION,
    MemoryWatch,
    RunWarnings,
    SpaceVerdict,
    SpaceWatch,
)
from outcore.monitor.watches.sleep_hold import SleepHold, hold_off_sleep
