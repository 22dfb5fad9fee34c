"""Entry of `performance_test.py`: its flags first, and torch only once they are right."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from outcore.common.output import watch_reader
from outcore.config import ConfigError
from outcore.train.configure import parse_config


def parser(prog: str = "performance_test.py") -> argparse.ArgumentParser:
    """Our own few flags; everything else is train_model.py's."""
    own = argparse.ArgumentParser(
        prog=prog,
        description="Before a long run: will it fit, how fast will it be, is this machine healthy. Takes the same "
        "flags as outcore train, whose --help lists them.",
        allow_abbrev=False,
        epilog="Exit codes: 0 GO, 3 GO WITH WARNINGS, 1 NO-GO, 2 wrong usage.",
    )
    own.add_argument("--quick", action="store_true", help="three steps; a checkpoint only below 4 GB")
    own.add_argument("--steps", type=int, metavar="N", help="measured steps, instead of 8 (--quick: 3)")
    own.add_argument("--report", type=Path, metavar="DIR", help="where the report goes [with the machine profile]")
    own.add_argument("--no_probe", action="store_true", help="do not measure links when they were never measured")
    return own


def main(argv: Sequence[str], root: Path | None = None) -> int:
    """Run the test; returns the exit code. `root`: where children find the package (default: where it lies).

    A mistyped flag is told, and --help shown, at once, not after the seconds that torch takes to import."""
    watch_reader(ends=False)  # the report is written all the same
    args, flags = parser("performance_test.py" if root else "outcore check").parse_known_args(list(argv))
    try:
        if args.steps is not None and args.steps < 1:
            raise ConfigError(f"steps: must be at least 1, got {args.steps}.")
        config = parse_config(flags)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from outcore.performance.main import run_test

    return run_test(config, argv, flags, root or Path(__file__).resolve().parents[2], args)
