"""The findings in the terminal.

What a performance test found: checks, figures and the verdict. Plain frozen values, to JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from outcore.common.quantities import counted, format_gb, format_gib, format_rate, format_s

Level = Literal["ok", "note", "warning", "stop"]
"""note: could not be told, or worth knowing; warning: run with care; stop: do not start."""
SCHEMA_VERSION = 3
LEAST_DIFFERENCE = {"bytes": 200e6, "s": 0.05}
"""Below it a plan is not called wrong: generator states, log files, a process that was busy elsewhere."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    level: Level
    words: str


@dataclass(frozen=True)
class ComparedRow:
    """A figure of the plan beside the same figure of the machine."""

    name: str
    unit: Literal["bytes", "s"]
    planned: float | None
    measured: float | None
    limit_pct: float
    """Percent that the plan may be off before it is said."""
    least: float | None = None
    """Differences below it do not count; None: LEAST_DIFFERENCE."""

    @property
    def error_pct(self) -> float | None:
        """The plan's error in percent of the measurement; positive: the plan was too high."""
        if self.planned is None or not self.measured:
            return None
        return 100.0 * (self.planned - self.measured) / self.measured

    @property
    def is_off(self) -> bool:
        """The plan is further off than it should be, by enough to matter."""
        if self.error_pct is None or abs(self.error_pct) <= self.limit_pct:
            return False
        least = LEAST_DIFFERENCE[self.unit] if self.least is None else self.least
        return abs((self.planned or 0.0) - (self.measured or 0.0)) > least


@dataclass(frozen=True)
class Projection:
    """The whole run, from what was measured."""

    total_steps: int
    step_s: float
    tokens_per_s: float
    training_s: float
    evaluations_s: float
    saves_s: float
    startup_s: float
    ends_at: str
    """Local time, if it started now."""
    written_bytes: float
    """To the drive: states of every step and checkpoints."""
    rating_share: float | None
    """Share of the drive's rated writes; None where its size is not known."""

    @property
    def rating_words(self) -> str:
        """Words for what the run takes of the drive's rated writes."""
        if self.rating_share is None:
            return "drive's usual rating unknown"
        pct = 100 * self.rating_share
        words = "less than 0.01" if pct < 0.01 else f"{pct:.2g}" if pct < 10 else f"{pct:,.0f}"
        return f"{words} % of the drive's usual rating"

    @property
    def total_s(self) -> float:
        return self.training_s + self.evaluations_s + self.saves_s + self.startup_s


@dataclass(frozen=True)
class Verdict:
    """GO, GO WITH WARNINGS or NO-GO, and why."""

    word: Literal["GO", "GO WITH WARNINGS", "NO-GO"]
    reasons: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 GO, 3 GO WITH WARNINGS, 1 NO-GO (2 is wrong usage)."""
        return {"GO": 0, "GO WITH WARNINGS": 3, "NO-GO": 1}[self.word]


@dataclass(frozen=True)
class Findings:
    """Everything of one test."""

    created_at: str
    argv: tuple[str, ...]
    elapsed_s: float
    verdict: Verdict
    checks: tuple[Check, ...]
    rows: tuple[ComparedRow, ...]
    projection: Projection | None
    trial: dict[str, Any] | None = None
    """Metrics of the trial run; None when it failed."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        record = dataclasses.asdict(self)
        record["schema_version"] = SCHEMA_VERSION
        record["exit_code"] = self.verdict.exit_code
        for row, plain in zip(self.rows, record["rows"], strict=True):
            plain |= {"error_pct": row.error_pct, "is_off": row.is_off}
        if self.projection is not None:
            record["projection"]["total_s"] = self.projection.total_s
        return record


MARKS = {"ok": "ok", "note": "-", "warning": "WARN", "stop": "STOP"}
COLORS = {"GO": "green", "GO WITH WARNINGS": "yellow", "NO-GO": "red"}


def show(found: Findings) -> None:
    """Checks, plan against measurement, projection, verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    checks = Table(title="Machine", title_justify="left", show_header=False)
    for check in found.checks:
        checks.add_row(MARKS[check.level], check.name, check.words)
    console.print(checks)
    if found.rows:
        table = Table(title="Plan against measurement", title_justify="left")
        for column in ("", "plan", "measured", "plan's error"):
            table.add_column(column, justify="right" if column else "left")
        for row in found.rows:
            error = "-" if row.error_pct is None else f"{row.error_pct:+.0f} %"
            style = "yellow" if row.is_off else ""
            table.add_row(row.name, _amount(row, row.planned), _amount(row, row.measured), error, style=style)
        console.print(table)
    run = found.projection
    if run is not None:
        console.print(
            f"The whole run: {counted(run.total_steps, 'step')} of {format_s(run.step_s)}, "
            f"{format_rate(run.tokens_per_s)} tokens/s; {format_s(run.total_s)} in all, to {run.ends_at}; "
            f"{format_gb(run.written_bytes)} written ({run.rating_words})."
        )
    console.print(f"\n[bold {COLORS[found.verdict.word]}]{found.verdict.word}[/]")
    for reason in found.verdict.reasons:
        console.print(f"- {reason}", markup=False)


def _amount(row: ComparedRow, value: float | None) -> str:
    """A figure with its unit."""
    if value is None:
        return "-"
    if row.unit == "s":
        return format_s(value)
    return format_gb(value) if row.name.startswith(("drive", "checkpoint")) else format_gib(value)
