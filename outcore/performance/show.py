"""The findings in the terminal."""

from __future__ import annotations

from outcore.common.quantities import counted, format_gb, format_gib, format_rate, format_s
from outcore.performance.findings import ComparedRow, Findings

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
    console.print(f"Compared with: {found.compared_with}.")
    for worse in found.regressions:
        console.print(f"- {worse.name}: {worse.before:.4g} before, {worse.now:.4g} now", style="yellow")
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
