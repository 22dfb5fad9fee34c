"""One seed: a world, its simulation, and what went wrong in it, as one number that replays."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import traceback
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.simulation import answers, lanes, saves, states
from tests.simulation.drive import Drive, Faults, mounted
from tests.simulation.threads import Killed, Simulation, installed

World = Callable[[Simulation, Drive], None]
WORLDS: dict[str, World] = {
    "saves": saves.world, "lanes": lanes.world, "answers": answers.world, "states": states.world,
}  # fmt: skip
LINE_SEEDS = 3
"""Of so many seeds one changes threads at any line of the product's."""


@dataclass(frozen=True)
class Outcome:
    """How a seed ended."""

    seed: int
    world: str
    steps: int
    trace: int
    """Checksum of who ran when: the same for the same seed."""
    error: BaseException | None
    struck: tuple[str, ...]

    def words(self) -> str:
        """What failed, and the command that shows it again."""
        assert self.error is not None
        found = "".join(traceback.format_exception(self.error))
        struck = "; ".join(self.struck) or "nothing"
        return (
            f"{found}\nseed {self.seed} ({self.world}): {type(self.error).__name__}: {self.error}\n"
            f"the drive's faults before: {struck}\nagain: python -m tests.simulation --seed {self.seed}"
        )


def world_of(seed: int) -> str:
    """The world that a seed runs."""
    return list(WORLDS)[seed % len(WORLDS)]


def seed_of(world: str, number: int) -> int:
    """The world's seed of this number."""
    return number * len(WORLDS) + list(WORLDS).index(world)


def run_seed(seed: int, *, seen: set[tuple[str, int]] | None = None) -> Outcome:
    """Run one seed to its end. `seen` gets the (file, line) of the product that it reached."""
    name = world_of(seed)
    simulation = Simulation(f"{name} {seed}", lines=zlib.crc32(b"%d" % seed) % LINE_SEEDS == 0, seen=seen)
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    root = Path(tempfile.mkdtemp(prefix="outcore-simulation-", dir=base))
    drive, error = Drive(simulation, root, Faults()), None
    logging.disable(logging.CRITICAL)
    before, sys.unraisablehook = sys.unraisablehook, lambda told: None  # what a killed process leaves cannot end well
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with mounted(drive), installed(simulation):
                try:
                    WORLDS[name](simulation, drive)
                except Killed:
                    pass
                except BaseException as raised:
                    error = raised
                error = simulation.failures[0] if simulation.failures else error
    finally:
        logging.disable(logging.NOTSET)
        sys.unraisablehook = before
        shutil.rmtree(root, ignore_errors=True)
    if isinstance(error, KeyboardInterrupt):
        raise error
    return Outcome(seed, name, simulation.steps, simulation.trace, error, tuple(drive.struck))
