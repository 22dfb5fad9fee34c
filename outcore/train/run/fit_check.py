"""Does this run fit this machine? Asked on every way to a run, before data is read or a weight is loaded.

The planner's forecast of exactly this run against what the machine has now. What it only leaves free (the page cache's
and the desktop's reserve, room for an evaluation) does not count: a run is refused when its own bytes do not fit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outcore.config import ConfigError
from outcore.engine.base import Decision
from outcore.plan.run import Forecast, Forecaster


def check_fit(
    decided: Decision,
    forecaster: Forecaster,
    forecast: Forecast,
    mode: str,
    say: Callable[[str], None],
    world_size: int,
) -> None:
    """ConfigError, on all ranks alike, for a run that cannot fit; with `mode` 'warn' a line instead."""
    why = forecast.why_not(decided.shortage)
    if why and forecast.plan is not None:
        change = forecaster.change_that_fits(forecast)
        say(f"what would fit: {change}" if change else "no single change that was tried makes it fit this machine")
    if world_size > 1:  # available RAM differs by a few bytes between ranks: rank 0's counts
        shared = [why]
        torch.distributed.broadcast_object_list(shared, src=0)
        why = shared[0]
    if not why:
        return
    if mode == "warn":
        say(f"WARNING: {why}")
        return
    raise ConfigError(
        f"{why} The same command with --plan shows where every byte goes; --fit_check warn tries it all the same."
    )
