"""See the package: seeds one by one, by time, or with planted bugs."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time

from tests.simulation import planted
from tests.simulation.run import WORLDS, run_seed, world_of


def main() -> int:
    """0: nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--count", type=int, default=1, help="so many seeds from it on")
    parser.add_argument("--seconds", type=float, help="draw seeds for so long")
    parser.add_argument("--world", choices=list(WORLDS), help="only seeds of this one")
    parser.add_argument(
        "--planted", nargs="?", const="", metavar="WORDS", help="plant bugs (those whose text has WORDS)"
    )
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # threads take turns, and on one core the next one need not be woken elsewhere
        os.sched_setaffinity(0, {secrets.choice(sorted(os.sched_getaffinity(0)))})
    if args.planted is not None:
        return planted.main(args.seconds or 25.0, args.planted)
    first = secrets.randbelow(10**9) if args.seed is None else args.seed
    began, count, steps, seed = time.perf_counter(), 0, 0, first
    print(f"seeds from {first}", flush=True)
    while True:
        while args.world not in (None, world_of(seed)):
            seed += 1
        outcome = run_seed(seed)
        count, steps, seed = count + 1, steps + outcome.steps, seed + 1
        if outcome.error is not None:
            print(outcome.words())
            return 1
        passed_s = time.perf_counter() - began
        if (passed_s >= args.seconds) if args.seconds is not None else (count >= args.count):
            break
    print(f"{count} seeds, {steps} steps, {steps / passed_s:,.0f} steps/s; the last: {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
