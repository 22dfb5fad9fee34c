"""Forecast against measurement, side by side: the figures that plan_vs_measured.py writes down."""

from __future__ import annotations

from typing import Any

BYTE_LIMIT_PCT, TIME_LIMIT_PCT = 10.0, 20.0
"""The project's aim for the worst run."""
LEAST_DRIVE_BYTES = 50_000_000
"""Below it the block device's counters hold other people's bytes: logs, the system."""


def _error(forecast: float | None, measured: float | None) -> float | None:
    """How far the forecast is off, in percent of the measurement; positive: too high."""
    if forecast is None or not measured:
        return None
    return 100.0 * (forecast - measured) / measured


def compare(result: dict[str, Any]) -> dict[str, Any]:
    """One run's figures: forecast, measured, error in percent."""
    forecast, measured = result["forecast"], result["measured"]
    vram = forecast["expected_vram_bytes"] or None
    reads, writes = forecast["drive_read_bytes_per_step"], forecast["drive_written_bytes_per_step"]
    pairs = {
        "vram_driver_bytes": (vram, measured["driver_vram_bytes"]),
        "vram_tensors_bytes": (forecast["expected_tensor_bytes"] or None, measured["allocator_peak_bytes"]),
        "rss_bytes": (forecast["expected_rss_bytes"], measured["rss_bytes"]),
        "drive_read_bytes": _drive(reads, measured["drive_read_bytes"]),
        "drive_write_bytes": _drive(writes, measured["drive_write_bytes"]),
        "step_s": (forecast["time_s"]["step_s"], measured["step_s"]),
    }
    row: dict[str, Any] = {"name": result["name"], "params": forecast["params"], "fits": forecast["fits"]}
    for name, (planned, found) in pairs.items():
        row[name] = {"forecast": planned, "measured": found, "error_pct": _error(planned, found)}
    row["terms_s"] = forecast["time_s"]
    row["phase_s"] = measured["phase_s"]
    return row


def _drive(planned: float, found: float | None) -> tuple[float | None, float | None]:
    if planned < LEAST_DRIVE_BYTES and (found or 0) < LEAST_DRIVE_BYTES:
        return None, None
    return planned, found


COLUMNS = (
    ("vram_driver_bytes", "VRAM, GB", 1e9, 2, BYTE_LIMIT_PCT),
    ("vram_tensors_bytes", "tensors, GB", 1e9, 2, BYTE_LIMIT_PCT),
    ("rss_bytes", "RSS, GB", 1e9, 2, BYTE_LIMIT_PCT),
    ("drive_read_bytes", "read/step, GB", 1e9, 2, BYTE_LIMIT_PCT),
    ("drive_write_bytes", "written/step, GB", 1e9, 2, BYTE_LIMIT_PCT),
    ("step_s", "s/step", 1.0, 3, TIME_LIMIT_PCT),
)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table: forecast / measured (error), the worst error of each column below."""
    if not rows:
        return "no run to compare\n"
    lines = ["| run | " + " | ".join(title for _, title, *_ in COLUMNS) + " |"]
    lines.append("|---|" + "---:|" * len(COLUMNS))
    for row in rows:
        cells = []
        for key, _, unit, digits, limit in COLUMNS:
            planned, found, error = (row[key][part] for part in ("forecast", "measured", "error_pct"))
            if planned is None or found is None:
                cells.append("-")
                continue
            words = f"{error:+.0f} %" if error is not None else "nothing measured"
            if error is None or abs(error) > limit:
                words = f"**{words}**"
            cells.append(f"{planned / unit:.{digits}f} / {found / unit:.{digits}f} ({words})")
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    worst = []
    for key, *_ in COLUMNS:
        errors = [abs(row[key]["error_pct"]) for row in rows if row[key]["error_pct"] is not None]
        worst.append(f"{max(errors):.0f} %" if errors else "-")
    lines.append("| worst | " + " | ".join(worst) + " |")
    return "\n".join([*lines, "", "forecast / measured (forecast's error)", ""])
