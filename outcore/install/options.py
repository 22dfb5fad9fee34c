"""Command line of `python setup.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

EXTRAS = ("ui", "serve", "evaluate")
"""Names of files in requirements/ that a part of the commands needs and training does not."""
SET_NAMES = ("auto", "cpu", "cuda12", "cuda13", "windows")


@dataclass(frozen=True)
class Options:
    check: bool = False
    """Verify only: nothing is installed or built."""
    json: bool = False
    """The report as JSON on stdout, and nothing else there."""
    dry_run: bool = False
    """Say what would be done; touch nothing."""
    run: bool = False
    """Set up, then train the embedded default (or with `rest` as flags)."""
    test: bool = False
    """Set up with the test tools, then run pytest with `rest`."""
    deepspeed: bool = False
    """Build DeepSpeed's extensions, which its engine needs and ours does not."""
    extras: tuple[str, ...] = ()
    """Parts of `EXTRAS` that are installed as well."""
    venv: Path | None = None
    set_name: str = "auto"
    offload_path: Path | None = None
    rest: tuple[str, ...] = ()
    """Arguments after `--`."""


def _extras(text: str) -> tuple[str, ...]:
    wanted = tuple(name for name in text.split(",") if name)
    if unknown := [name for name in wanted if name not in EXTRAS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(EXTRAS)}")
    return wanted


def parse_options(argv: Sequence[str], prog: str = "python setup.py") -> Options:
    """Raises SystemExit(2) with a message for a flag that does not exist or does not fit another."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Install outcore on this machine, build what it needs, verify every part and say what to fix.",
        epilog="Arguments after -- go to pytest (with --test) or to train_model.py (with --run). Exit code: 0 every "
        "required part holds, 1 one does not, 2 wrong flags, 3 the installation failed, 130 interrupted.",
    )
    parser.add_argument("--check", action="store_true", help="verify only: install and build nothing")
    parser.add_argument("--json", action="store_true", help="print the report as JSON (progress goes to stderr)")
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="print what would be installed and built, touch nothing"
    )
    parser.add_argument("--run", action="store_true", help="set up, then train the embedded default")
    parser.add_argument("--test", action="store_true", help="set up with the test tools, then run the tests")
    parser.add_argument("--deepspeed", action="store_true", help="build what --engine deepspeed needs, for minutes")
    parser.add_argument(
        "--venv", type=Path, metavar="DIR", help="environment to use or make (default: active, or .venv)"
    )
    parser.add_argument(
        "--with",
        dest="extras",
        type=_extras,
        default=(),
        metavar="NAMES",
        help=f"install what these need, too: {','.join(EXTRAS)}, with commas between them",
    )
    parser.add_argument("--set", dest="set_name", choices=SET_NAMES, default="auto", help="packages to install")
    parser.add_argument(
        "--offload-path", "--offload_path", type=Path, metavar="DIR", help="folder whose drive training will offload to"
    )
    flags, rest = list(argv), []
    if "--" in flags:
        cut = flags.index("--")
        flags, rest = flags[:cut], flags[cut + 1 :]
    values = vars(parser.parse_args(flags))
    options = Options(**values, rest=tuple(rest))
    if options.check and (options.run or options.test or options.deepspeed or options.dry_run):
        parser.error("--check only verifies: it does not go with --run, --test, --deepspeed or --dry-run")
    if options.run and options.test:
        parser.error("--run and --test are two jobs: start them one after the other")
    if options.dry_run and (options.run or options.test) and rest:
        parser.error("--dry-run runs nothing, so there is nothing to pass arguments to")
    if rest and not (options.run or options.test):
        parser.error("arguments after -- go to pytest (--test) or train_model.py (--run): give one of the two")
    return options


def asks_for_deepspeed(options: Options) -> bool:
    """Whether what is started next runs DeepSpeed's engine: its tests, or a run that names it."""
    words = options.rest if options.run else ()
    names_it = any(pair == ("--engine", "deepspeed") for pair in pairwise(words)) or "--engine=deepspeed" in words
    return options.deepspeed or options.test or names_it
