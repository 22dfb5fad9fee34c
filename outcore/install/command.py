"""`outcore setup`: in a clone what `python setup.py` does there; where pip installed outcore, every part used once."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outcore.common.files import user_folder
from outcore.install.errors import EXIT_NOT_READY, EXIT_OK
from outcore.install.extensions import PROBE
from outcore.install.options import parse_options
from outcore.install.progress import InstallProgress
from outcore.install.verify.doctor import RunningProbe, rows_of_pip
from outcore.install.verify.report import FILE, make_report, print_table, write_report
from outcore.install.verify.rows import ReportRow, all_hold
from outcore.machine import detect_machine

CLONE = Path(__file__).resolve().parents[2]
"""Folder of setup.py, in a clone."""


def main(argv: Sequence[str], clone: Path = CLONE) -> int:
    """Set up or verify; the exit code is that of setup.py."""
    if (clone / "setup.py").is_file() and (clone / "requirements").is_dir():
        parse_options(argv, "outcore setup")
        return subprocess.call([sys.executable, str(clone / "setup.py"), *argv])
    usage = "outcore setup [--check] [--json]   (pip installed outcore here, so there is only to verify)"
    parser = argparse.ArgumentParser("outcore setup", usage)
    parser.add_argument("--check", action="store_true", help="use every part once and say what to fix, as without it")
    parser.add_argument("--json", action="store_true", help="print the report as JSON (progress goes to stderr)")
    options = parser.parse_args(argv)
    progress = InstallProgress(sys.stderr)
    progress.begin("verifying every part")
    rows: list[ReportRow] = []
    try:
        rows = _verified(progress)
    finally:
        progress.end(bool(rows))
    report = make_report(rows, detect_machine(), "pip", sys.prefix)
    write_report(report, user_folder() / FILE)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(rows, sys.stdout)
    return EXIT_OK if all_hold(rows) else EXIT_NOT_READY


def _verified(progress: InstallProgress) -> list[ReportRow]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "packages"
        command = [sys.executable, "-m", PROBE, "packages", str(results), "cuda" if detect_machine().gpus else "cpu"]
        return rows_of_pip(*RunningProbe(command, os.environ, results, Path(folder)).finish(tell=progress.detail))
