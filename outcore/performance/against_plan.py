"""The plan against the measurement, term by term, and the whole run projected from what was measured.

The verdict: one word and its reasons, from checks, plan and projection. Pure."""

from __future__ import annotations

import datetime
from typing import Any

from outcore.common.quantities import format_gb
from outcore.performance.health import measured_steps, median_of
from outcore.performance.show import Check, ComparedRow, Projection, Verdict
from outcore.plan import RATED_WRITES_PER_BYTE

BYTES_LIMIT_PCT, TIME_LIMIT_PCT = 10.0, 20.0
WAIT_LIMIT_PCT, SAVE_LIMIT_PCT = 50.0, 50.0
"""Small remainders of two large figures, and the system's write-back, are forecast less well."""
LEAST_WAIT = 0.1
"""Share of a step: a wait forecast wrong by less does not count."""
SAVE_OVERHEAD_S = 0.5
"""Files made, synced and renamed, and their checksums written, whatever their size."""
LEAST_DRIVE_BYTES = 50_000_000
"""Below it the drive's counters hold other programs' bytes as well."""


def compare(found: dict[str, Any]) -> list[ComparedRow]:
    """Rows in the order in which they are read; [] without a forecast."""
    plan = found["forecast"]
    if plan is None:
        return []
    records = measured_steps(found)
    gpu_peaks = [r["gpu_mem_peak_bytes"] for r in found["steps"] if r.get("gpu_mem_peak_bytes")]
    # Layers that stay take what is idle, so how many do is no question of whether a run fits: they are left out.
    tensors = plan["expected_tensor_bytes"] - plan["staying_bytes"] or None
    gpu_peak = max(gpu_peaks) - found["staying_bytes"] if gpu_peaks else None
    # The process alone: the compiler's workers, which a step's record counts in, share their pages with it.
    rss = found["rss_peak_bytes"]
    # Steps that clip do not take the RAM of optimistic updates.
    planned_rss, rss = plan["expected_rss_bytes"] - plan["ahead_bytes"], rss and rss - found["ahead_bytes"]
    times = _times_s(found)
    rows = [ComparedRow("RAM: resident", "bytes", planned_rss, rss, BYTES_LIMIT_PCT)]
    if tensors is not None or gpu_peaks:
        rows.insert(0, ComparedRow("VRAM: tensors, peak", "bytes", tensors, gpu_peak, BYTES_LIMIT_PCT))
    for name, planned, key in (
        ("drive: read per step", plan["drive_read_bytes_per_step"], "nvme_read_bytes"),
        ("drive: written per step", plan["drive_written_bytes_per_step"], "nvme_write_bytes"),
    ):
        seen = median_of(records, key)
        if planned >= LEAST_DRIVE_BYTES or (seen or 0) >= LEAST_DRIVE_BYTES:
            rows.append(ComparedRow(name, "bytes", planned, seen, BYTES_LIMIT_PCT))
    rows.append(ComparedRow("checkpoint", "bytes", plan["checkpoint_bytes"], found.get("saved_bytes"), BYTES_LIMIT_PCT))
    known = not plan["step_is_lower_bound"]
    rows.append(
        ComparedRow("step", "s", times["step_s"] if known else None, median_of(records, "step_s"), TIME_LIMIT_PCT)
    )
    if known:
        rows += _streamed(times, records) if plan["engine"] == "stream" else _deepspeed(times, records)
    rows.append(
        ComparedRow(
            "checkpoint: save", "s", plan["checkpoint_s"] + SAVE_OVERHEAD_S, found.get("save_s"), SAVE_LIMIT_PCT
        )
    )
    return rows


def _times_s(found: dict[str, Any]) -> dict[str, float]:
    """The forecast of steps as they were measured: of ones that clip nothing if updates began ahead of the norm."""
    plan = found["forecast"]
    return plan["time_whole_s"] if found["ahead_bytes"] and plan["time_whole_s"] else plan["time_s"]


def _streamed(times: dict[str, float], records: list[dict[str, Any]]) -> list[ComparedRow]:
    """The device and the host at work, and the waits that the overlap leaves: for copies, the drive, the optimizer."""
    step_s = median_of(records, "step_s") or 0.0
    waits = sum(_phase(records, name) for name in ("stall_pcie", "stall_nvme", "stall_optimizer"))
    planned = times["compute_s"] + times["host_overhead_s"]
    left, least = max(0.0, times["step_s"] - planned), LEAST_WAIT * step_s
    return [
        ComparedRow(
            "  of it computing, with the host's work", "s", planned, max(0.0, step_s - waits) or None, TIME_LIMIT_PCT
        ),
        ComparedRow("  of it waiting (what the overlap leaves)", "s", left, waits, WAIT_LIMIT_PCT, least),
    ]


def _deepspeed(times: dict[str, float], records: list[dict[str, Any]]) -> list[ComparedRow]:
    """The passes, then the optimizer, one after the other."""
    planned = max(times["compute_s"] + times["host_overhead_s"], times["h2d_s"], times["d2h_s"])
    passes = _phase(records, "forward") + _phase(records, "backward")
    return [
        ComparedRow("  of it forward and backward", "s", planned, passes or None, TIME_LIMIT_PCT),
        ComparedRow(
            "  of it the optimizer", "s", times["step_s"] - planned, _phase(records, "optimizer"), TIME_LIMIT_PCT
        ),
    ]


def _phase(records: list[dict[str, Any]], name: str) -> float:
    values = sorted(record["phase_s"].get(name, 0.0) for record in records)
    return values[len(values) // 2] if values else 0.0


def project(found: dict[str, Any], now: datetime.datetime, *, is_saved: bool = True) -> Projection:
    """The whole run: its steps at the measured pace, evaluations, checkpoints (where it `is_saved`), start."""
    records, length = measured_steps(found), found["length"]
    step_s = median_of(records, "step_s") or 0.0
    total = length["total_steps"]
    saves = _times(total, length["save_steps"]) if is_saved else 0
    evals = _times(total, length["eval_steps"])
    plan = found["forecast"] or {}
    save_s = found.get("save_s") or plan.get("checkpoint_s") or 0.0
    size = found.get("saved_bytes") or found["state_bytes"]
    each = plan.get("drive_written_bytes_per_step") or 0.0
    written = float(each) * total + saves * size
    first = found["steps"][0]["step_s"] if found["steps"] else 0.0
    startup_s = found["startup_s"]["all"] + max(0.0, first - step_s)
    drive_bytes = found["machine"].get("nvme_total_bytes")
    training_s, evaluations_s, saves_s = (
        step_s * total,
        evals * (found["eval"] or {}).get("seconds", 0.0),
        saves * save_s,
    )
    whole = datetime.timedelta(seconds=training_s + evaluations_s + saves_s + startup_s)
    return Projection(
        total_steps=total,
        step_s=step_s,
        tokens_per_s=median_of(records, "tokens_per_s") or 0.0,
        training_s=training_s,
        evaluations_s=evaluations_s,
        saves_s=saves_s,
        startup_s=startup_s,
        ends_at=(now + whole).strftime("%Y-%m-%d %H:%M"),
        written_bytes=written,
        rating_share=written / (drive_bytes * RATED_WRITES_PER_BYTE) if drive_bytes else None,
    )


def _times(total: int, every: int) -> int:
    """Count the times of something that is due every `every` steps and at the end."""
    return -(-total // every) if every else 1


MOST_RATING_SHARE = 0.05
"""A run that takes more of the drive's rated writes than this is worth a thought."""


def check_space(free_bytes: int, checkpoint_bytes: int, kept: int) -> list[Check]:
    """Whether the drive has room for the checkpoints that a run keeps, and for the one being written."""
    needed = (kept + 1) * checkpoint_bytes
    if needed <= free_bytes:
        return []
    words = (
        f"{kept} checkpoints kept and one being written need {format_gb(needed)}, {format_gb(free_bytes)} are free. "
        "Lower --save_total_limit, or use another --checkpoint_dir"
    )
    return [Check("space for checkpoints", "stop", words)]


def judge(
    checks: list[Check],
    rows: list[ComparedRow],
    projection: Projection | None,
    failure: str,
    *,
    fits: bool | None,
) -> Verdict:
    """`failure`: why the trial did not end well, '' when it did. `fits`: what the plan says, None without one."""
    stops = [f"{check.name}: {check.words}" for check in checks if check.level == "stop"]
    if failure:
        stops.insert(0, f"the trial run failed: {failure}")
    if projection is not None and projection.rating_share is not None and projection.rating_share > 1.0:
        stops.append(f"the run would write {format_gb(projection.written_bytes)}, more than the drive is rated for")
    warnings = [f"{check.name}: {check.words}" for check in checks if check.level == "warning"]
    if fits is False and not failure:
        warnings.append("the plan says that it does not fit, the trial says that it does: the room left is small")
    warnings += [_off(row) for row in rows if row.is_off]
    if projection is not None and MOST_RATING_SHARE < (projection.rating_share or 0.0) <= 1.0:
        warnings.append(
            f"drive wear: {format_gb(projection.written_bytes)} written, "
            f"{100 * (projection.rating_share or 0.0):.0f} % of the drive's usual rating"
        )
    if stops:
        return Verdict("NO-GO", (*stops, *warnings))
    if warnings:
        return Verdict("GO WITH WARNINGS", tuple(warnings))
    return Verdict("GO", ("the run fits, the machine is healthy, and the plan holds",))


def _off(row: ComparedRow) -> str:
    error = row.error_pct or 0.0
    return f"plan: {row.name.strip()} was forecast {abs(error):.0f} % too {'high' if error > 0 else 'low'}"
