"""The report's pictures as PNG bytes: tiers over a step, seconds by phase, plan beside measurement. matplotlib, Agg."""

from __future__ import annotations

import io
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from outcore.common.quantities import GB, GIB
from outcore.performance.findings import ComparedRow
from outcore.performance.steps import measured_steps

BLUE, ORANGE, GREEN, SKY, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#999999"
PHASES = {
    "data": GREY, "forward": SKY, "backward": BLUE, "optimizer": GREEN, "stall_pcie": ORANGE, "stall_nvme": PURPLE,
    "stall_optimizer": GREY,
}  # fmt: skip
FEW_POINTS = 3


def _png(figure: Figure) -> bytes:
    sink = io.BytesIO()
    figure.savefig(sink, format="png")
    return sink.getvalue()


def _plain(ax: Axes, title: str) -> None:
    ax.set_title(title, fontsize=11, loc="left")
    ax.grid(alpha=0.3)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def tiers_over_steps(found: dict[str, Any]) -> bytes | None:
    """What GPU and RAM hold and what the drive moves, over the measured steps; None without enough points."""
    points, marks = found["timeline"], found["marks_s"]
    if len(points) < FEW_POINTS:
        return None
    times = [point["t_s"] for point in points]
    has_gpu, has_drive = "gpu_tensors_bytes" in points[0], "drive_read_bytes" in points[0]
    rows = 1 + has_gpu + has_drive
    figure = Figure(figsize=(11, 2.3 * rows), dpi=110, layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    at = 0
    if has_gpu:
        _line(axes[0], times, points, "gpu_reserved_bytes", GIB, GREY, "held by the allocator")
        _line(axes[0], times, points, "gpu_tensors_bytes", GIB, BLUE, "tensors")
        _plain(axes[0], "VRAM, GiB")
        axes[0].set_ylim(0, 1.15 * max(point["gpu_reserved_bytes"] for point in points) / GIB or 1.0)
        axes[0].legend(fontsize=8, loc="lower right")
        at = 1
    _line(axes[at], times, points, "rss_bytes", GIB, GREEN, "resident")
    _plain(axes[at], "RAM of the run, GiB")
    axes[at].set_ylim(0, 1.15 * max(point.get("rss_bytes", 0.0) for point in points) / GIB or 1.0)
    if has_drive:
        for key, color, label in (("drive_read_bytes", SKY, "read"), ("drive_write_bytes", ORANGE, "written")):
            first = points[0].get(key, 0.0)
            moved = [(point.get(key, first) - first) / GB for point in points]
            axes[at + 1].plot(times, moved, color=color, label=label, linewidth=1.6)
        _plain(axes[at + 1], "Drive since the first measured step, GB (all programs)")
        axes[at + 1].set_ylim(bottom=0, top=max(axes[at + 1].get_ylim()[1], 0.1))
        axes[at + 1].legend(fontsize=8, loc="upper left")
    for ax in axes:
        for mark in marks:
            ax.axvline(mark, color="#555555", linewidth=0.8, linestyle=":")
    axes[-1].set_xlabel("seconds; dotted: a step ends")
    return _png(figure)


def _line(
    ax: Axes, times: list[float], points: list[dict[str, float]], key: str, unit: int, color: str, label: str
) -> None:
    values = [point.get(key, float("nan")) / unit for point in points]
    ax.plot(times, values, color=color, label=label, linewidth=1.6)


def phases(found: dict[str, Any]) -> bytes | None:
    """Each step's seconds, and by phase those of the measured ones."""
    steps = found["steps"]
    if not steps:
        return None
    figure = Figure(figsize=(11, 3.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    warm = found["warm_steps"]
    colors = [GREY if index < warm else BLUE for index in range(len(steps))]
    left.bar(range(1, len(steps) + 1), [step["step_s"] for step in steps], color=colors, width=0.7)
    _plain(left, "Seconds of each step (grey: warm-up)")
    left.set_xlabel("step")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    records = measured_steps(found)
    names = [name for name in PHASES if any(name in record["phase_s"] for record in records)]
    names += sorted({name for record in records for name in record["phase_s"]} - set(names))
    means = [sum(record["phase_s"].get(name, 0.0) for record in records) / max(1, len(records)) for name in names]
    right.barh(range(len(names)), means, color=[PHASES.get(name, GREY) for name in names])
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    _plain(right, "Seconds by phase, mean of the measured steps")
    right.set_xlabel("seconds; stalls and data lie within or beside the passes")
    return _png(figure)


def plan_beside_measurement(rows: list[ComparedRow]) -> bytes | None:
    """Each figure's plan as a share of its measurement."""
    known = [row for row in rows if row.error_pct is not None]
    if not known:
        return None
    figure = Figure(figsize=(11, 0.9 + 0.38 * len(known)), dpi=110, layout="constrained")
    ax = figure.subplots()
    shares = [100.0 + (row.error_pct or 0.0) for row in known]
    shown = [min(share, 200.0) for share in shares]
    ax.barh(range(len(known)), shown, color=[ORANGE if row.is_off else GREEN for row in known], height=0.6)
    for index, (share, length) in enumerate(zip(shares, shown, strict=True)):
        ax.annotate(
            f"{share:.0f} %" + (" →" if share > length else ""), (length, index), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    ax.set_yticks(range(len(known)), [row.name for row in known])
    ax.invert_yaxis()
    ax.axvline(100, color="#222222", linewidth=1.2)
    ax.set_xlim(0, 225)
    _plain(ax, "The plan in percent of the measurement (orange: further off than it should be)")
    return _png(figure)
