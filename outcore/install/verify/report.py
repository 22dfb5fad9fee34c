"""The verification as people and programs read it: a table (rich when there, else plain) and JSON.

`python -m outcore.install.verify.report FILE` prints the table of a saved report; the installer calls it that way with
the environment's interpreter, because the one that runs setup.py need not have rich."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from outcore.install.verify.rows import DEGRADED, MISSING, OK, ReportRow, all_hold
from outcore.machine import Machine

FILE = "setup_report.json"
"""Name of the saved report in `user_folder`, where every folder of work finds it."""
COLUMNS = ("part", "found", "needed", "status", "fix")
STYLES = {OK: "green", DEGRADED: "yellow", MISSING: "bold red"}


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
    """Print the table, by rich when it can be imported."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print_plain(rows, out)
        return
    table = Table(title="outcore on this machine", show_lines=False, expand=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        style = STYLES[row.status]
        status = f"[{style}]{row.status}[/{style}]"
        table.add_row(row.part, escape(row.found), escape(row.needed), status, escape(row.fix))
    # Without a terminal rich assumes 80 columns, in which five columns are unreadable.
    Console(file=out, width=None if out.isatty() else 160).print(table)


def print_plain(rows: Sequence[ReportRow], out: TextIO) -> None:
    """Without rich: a line a part, with its fix below."""
    width = max((len(row.part) for row in rows), default=0)
    for row in rows:
        print(f"{row.status:<9} {row.part:<{width}}  {row.found}", file=out)
        if row.status != OK:
            indent = " " * (12 + width)
            for text in (f"needed: {row.needed}", f"fix: {row.fix}" if row.fix else ""):
                for line in textwrap.wrap(text, 100, break_long_words=False):
                    print(indent + line, file=out)
    out.flush()


def main(arguments: Sequence[str]) -> None:
    report = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    print_table([ReportRow(**row) for row in report["rows"]], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
