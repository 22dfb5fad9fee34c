"""The flags of `gds_optimizer.py`, without anything that takes time to import."""

from __future__ import annotations

import argparse
from pathlib import Path

from outcore.common.files import user_folder

DESCRIPTION = """\
Finds out which path data really takes between drive, RAM and GPU on this machine (GPUDirect Storage or not, and why),
builds the staging buffer, measures every link, and recommends settings. Writes gds_report.json and machine_profile.json
(for the planner), where every folder finds them."""

EPILOG = """\
Exit codes: 0 done, 2 usage or unusable path or configuration, 130 interrupted (Ctrl-C), 143 terminated."""


def parser(root: Path, prog: str = "gds_optimizer.py") -> argparse.ArgumentParser:
    """Flags of the probe. `prog`: what the user typed."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="the main figures only, under 20 s")
    effort.add_argument("--full", action="store_true", help="the whole grid of settings, about 8 minutes")
    parser.add_argument(
        "--path",
        action="append",
        metavar="DIR",
        help="directory on a drive to measure; repeat for several (default: nvme_path of the configuration, else here)",
    )
    parser.add_argument("--apply", action="store_true", help="write the recommended settings into the configuration")
    parser.add_argument("--create", action="store_true", help="with --apply: make the configuration if it is missing")
    parser.add_argument("--json", action="store_true", help="print the report on stdout, everything else on stderr")
    parser.add_argument(
        "--config", default=str(root / "deepspeed_config.json"), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument(
        *("--log_dir", "--logs"),
        dest="logs",
        default=str(user_folder()),
        metavar="DIR",
        help="where the report goes and the planner looks; default: %(default)s",
    )
    parser.add_argument(
        *("--staging_gib", "--staging-gib"),
        type=_positive,
        metavar="GIB",
        help="staging memory to build, instead of the file's",
    )
    parser.add_argument(
        *("--file_mib", "--file-mib"), type=_positive, metavar="MIB", help="size of the test file, per directory"
    )
    parser.add_argument("--seconds", type=_positive, metavar="S", help="time for the measurements")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value
