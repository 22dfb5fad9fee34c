"""A run as a process: who started it, what stops it, how long its start took, its random numbers and fixed order."""

from outcore.train.process.determinism import explain_order, fix_order
from outcore.train.process.launcher_watch import watch_launcher
from outcore.train.process.network import stay_offline
from outcore.train.process.random_state import load_random_state, save_random_state, seed_everything
from outcore.train.process.startup_clock import StartupClock
from outcore.train.process.stop_request import StopRequest

__all__ = [
    "StartupClock",
    "StopRequest",
    "explain_order",
    "fix_order",
    "load_random_state",
    "save_random_state",
    "seed_everything",
    "stay_offline",
    "watch_launcher",
]
