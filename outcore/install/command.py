"""`outcore setup`: in a clone what `python setup.py` does there; where pip installed outcore, every part used once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from outcore.common.files import user_folder
from outcore.common.output import say
from outcore.install.errors import EXIT_NOT_READY, EXIT_OK
from outcore.install.extensions import PROBE
from outcore.install.options import Options, parse_options
from outcore.install.progress import InstallProgress
from outcore.install.verify.doctor import RunningProbe, rows_of_pip
from outcore.install.verify.report import FILE, make_report, print_table, write_report
from outcore.install.verify.rows import ReportRow, all_hold
from outcore.machine import detect_machine

CLONE = Path(__file__).resolve().parents[2]
"""Folder of setup.py, in a clone."""


def main(argv: Sequence[str], clone: Path = CLONE) -> int:
    """Set up or verify; the exit code is that of setup.py."""
    options = parse_options(argv, "outcore setup")
    if (clone / "setup.py").is_file() and (clone / "requirements").is_dir():
        return subprocess.call([sys.executable, str(clone / "setup.py"), *argv])
    if replace(options, check=False, json=False) != Options():
        say("outcore setup: pip installed outcore here, so there is only to verify: give --check, --json or nothing.")
        return 2
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
    accelerator = "cuda" if detect_machine().gpus else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "packages"
        command = [sys.executable, "-m", PROBE, "packages", str(results), accelerator]
        return rows_of_pip(*RunningProbe(command, os.environ, results, Path(folder)).finish(tell=progress.detail))
