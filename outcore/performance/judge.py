"""The verdict: one word and its reasons, from checks, plan, projection and comparison. Pure.

Against the last test on this machine: the same run, figure by figure; more than a tenth worse is a regression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outcore.common.files import read_object
from outcore.common.quantities import format_gb
from outcore.performance.show import SCHEMA_VERSION, Check, ComparedRow, Projection, Regression, Verdict

MOST_RATING_SHARE = 0.05
"""A run that takes more of the drive's rated writes than this is worth a thought."""

WORDS = {
    "step_s": "seconds per step",
    "tokens_per_s": "tokens per second",
    "model_load_s": "seconds to load the model",
    "engine_init_s": "seconds to make the engine",
    "first_step_s": "seconds of the first step",
    "save_s": "seconds to save a checkpoint",
    "load_s": "seconds to load a checkpoint",
    "gpu_mem_peak_bytes": "bytes of GPU memory",
    "ram_rss_bytes": "bytes of resident RAM",
}
"""The figures of a run as a person calls them; links have their own names."""


def judge(
    checks: list[Check],
    rows: list[ComparedRow],
    projection: Projection | None,
    regressions: list[Regression],
    failure: str,
    *,
    fits: bool | None,
    free_bytes: int,
    checkpoint_bytes: int,
    kept: int,
) -> Verdict:
    """`failure`: why the trial did not end well, '' when it did. `fits`: what the plan says, None without one."""
    stops = [f"{check.name}: {check.words}" for check in checks if check.level == "stop"]
    if failure:
        stops.insert(0, f"the trial run failed: {failure}")
    needed = (kept + 1) * checkpoint_bytes
    if not failure and needed > free_bytes:
        stops.append(
            f"drive space: {kept} checkpoints kept and one being written need {format_gb(needed)}, "
            f"{format_gb(free_bytes)} are free. Lower --save_total_limit, or use another --checkpoint_dir"
        )
    if projection is not None and projection.rating_share is not None and projection.rating_share > 1.0:
        stops.append(f"the run would write {format_gb(projection.written_bytes)}, more than the drive is rated for")
    warnings = [f"{check.name}: {check.words}" for check in checks if check.level == "warning"]
    if fits is False and not failure:
        warnings.append("the plan says that it does not fit, the trial says that it does: the room left is small")
    warnings += [_off(row) for row in rows if row.is_off]
    warnings += [
        f"{WORDS.get(r.name, r.name)} got worse by {r.worse_pct:.0f} % since the last test "
        f"({r.before:.4g} -> {r.now:.4g})"
        for r in regressions
    ]
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


WORSE = 0.10
LEAST_S = 0.2
"""Times below it are noise."""
MACHINE_RATES = ("_gb_per_s", "_tflops", "_gparams_per_s")
HIGHER_IS_BETTER = ("tokens_per_s", *MACHINE_RATES)


def last_report(path: Path) -> dict[str, Any] | None:
    """The report that is there; None when there is none or it cannot be read."""
    record = read_object(path)
    return record if record.get("schema_version") == SCHEMA_VERSION else None


def compared(
    last: dict[str, Any] | None, run_key: dict[str, Any], machine_key: dict[str, Any], figures: dict[str, Any]
) -> tuple[list[Regression], str]:
    """(what got worse, with which test it was compared or why with none)."""
    if last is None:
        return [], "no earlier test here"
    if last["machine_key"] != machine_key:
        return [], "the last test was made on another machine"
    before = last["figures"]
    same_run = last["run_key"] == run_key
    names = [name for name in figures if name in before and (same_run or name.endswith(MACHINE_RATES))]
    found = [
        Regression(name, before[name], figures[name]) for name in names if _is_worse(name, before[name], figures[name])
    ]
    words = last["created_at"] if same_run else f"{last['created_at']} (another run: the machine's own rates only)"
    return found, words


def _is_worse(name: str, before: Any, now: Any) -> bool:
    if not isinstance(before, int | float) or not isinstance(now, int | float) or before <= 0:
        return False
    if name.endswith(HIGHER_IS_BETTER):
        return now < before * (1 - WORSE)
    if name.endswith("_s") and max(before, now) < LEAST_S:
        return False
    return now > before * (1 + WORSE)
