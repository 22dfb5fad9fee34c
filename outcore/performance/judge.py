"""The verdict: one word and its reasons, from checks, plan, projection and comparison. Pure."""

from __future__ import annotations

from outcore.common.quantities import format_gb
from outcore.performance.findings import Check, ComparedRow, Projection, Regression, Verdict

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
