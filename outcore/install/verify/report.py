"""The verification as people and programs read it: a table in plain text, and JSON."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from outcore.install.verify.rows import OK, ReportRow, all_hold
from outcore.machine import Machine

FILE = "setup_report.json"
"""Name of the saved report in `user_folder`, where every folder of work finds it."""


def make_report(
    rows: list[ReportRow], machine: Machine, set_name: str, environment: str, error: str = ""
) -> dict[str, Any]:
    """The report as plain data: `ok` is true only when every required row holds and nothing failed before."""
    return {
        "ok": all_hold(rows) and not error,
        "error": error or None,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "set": set_name,
        "environment": environment,
        "rows": [row.to_dict() for row in rows],
        "machine": machine.to_dict(),
    }


def write_report(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def print_table(rows: Sequence[ReportRow], out: TextIO) -> None:
    """Print a line a part, with what it needs and its fix below where it does not hold."""
    width = max((len(row.part) for row in rows), default=0)
    for row in rows:
        print(f"{row.status:<9} {row.part:<{width}}  {row.found}", file=out)
        if row.status != OK:
            indent = " " * (12 + width)
            for text in (f"needed: {row.needed}", f"fix: {row.fix}" if row.fix else ""):
                for line in textwrap.wrap(text, 100, break_long_words=False):
                    print(indent + line, file=out)
    out.flush()
