"""A run as a process: what stops it, its random numbers and fixed order, what a foreign trainer's steps are for it."""

from outcore.train.process.random_state import (
    explain_order,
    fix_order,
    load_random_state,
    save_random_state,
    seed_everything,
)
from outcore.train.process.stop_request import StopRequest
