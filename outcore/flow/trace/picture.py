"""schedule.png: one step of a trace as a picture, to see at a glance what runs at the same time as what.

    outcore trace RUN [schedule.png] [--step N]

One band for each track: the device on top, then the link's two directions, the drive, the optimizer's threads, and what
was waited for. Layers are numbered where there is room for it. Drawn with matplotlib, without a display.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from outcore.common import replacing
from outcore.common.output import tell_error
from outcore.common.quantities import format_s
from outcore.config.commands import trace_flags
from outcore.flow.trace.file import Slice, read_trace, rows_of

BANDS = (
    ("compute", "device\ncomputes"),
    ("device waits", "device\nwaits"),
    ("upload", "RAM → device"),
    ("download", "device → RAM"),
    ("drive read", "drive → RAM"),
    ("drive write", "RAM → drive"),
    ("optimizer", "optimizer\n(CPU threads)"),
    ("host waits", "host\nwaits"),
)
"""Tracks from top to bottom, with what they are called in the picture."""
COLOURS = {
    "forward": ("#74a9e8", "forward"),
    "head": ("#2b8a3e", "head: loss and its gradient"),
    "backward": ("#e8a15c", "backward, recomputing the layer"),
    "upload": ("#9775cd", "weights (and checkpoints) up"),
    "download": ("#c2568f", "gradients (and checkpoints) down"),
    "read": ("#15aabf", "drive reads"),
    "write": ("#0b7285", "drive writes"),
    "update": ("#5c7a29", "AdamW on a unit"),
    "guarded_update": ("#5c7a29", "AdamW on a unit"),
    "sum_squares": ("#a9b665", "look for non-finite gradients"),
    "wait pcie": ("#f1b0b0", "waits for a copy"),
    "wait nvme": ("#c92a2a", "waits for the drive"),
    "wait optimizer": ("#f76707", "waits for the optimizer"),
}
OTHER = ("#adb5bd", "other")
TRACE_NAME = "trace.json"
MAX_ROWS = 4
"""Rows of a band; what overlaps more often shares the last one."""
MIN_LABEL_SHARE = 0.011
"""Part of the picture's width below which a slice has no room for its number."""

MIN_LABEL_FILL = 0.5
"""Neighbours with wider gaps between them get no number in common."""
MIN_EDGE_SHARE = 0.002


def step_slices(slices: Sequence[Slice], number: int | None = None) -> tuple[Slice, list[Slice]]:
    """(the step, what happened during it). By default the last step. ValueError when the trace has no such step."""
    steps = {one.args["step"]: one for one in slices if one.track == "steps"}
    if not steps:
        raise ValueError("the trace holds no whole step (the run failed within the first one)")
    if number is not None and number not in steps:
        raise ValueError(f"the trace holds no step {number}, but {', '.join(map(str, sorted(steps)))}")
    step = steps[max(steps) if number is None else number]
    inside = [s for s in slices if s.track != "steps" and s.end_s > step.begin_s and s.begin_s < step.end_s]
    return step, inside


def draw_schedule(trace_path: Path, png_path: Path, *, step: int | None = None) -> None:
    """Draw a step of `trace_path`, replacing the picture. ValueError for a trace that cannot be drawn; OSError."""
    slices, about = read_trace(trace_path)
    figure = _draw(*step_slices(slices, step), about)
    png_path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(png_path) as file:
        figure.savefig(file, format="png", dpi=130)


def short_name(one: Slice) -> str:
    """What fits into a slice: the layer's number, or the first letters of embedding and head."""
    if "waits" in one.track:
        return ""
    number = re.search(r"(?:layer|activations) (\d+)", one.name)
    if number:
        return number.group(1)
    return {"head": "H"}.get(one.name, "E" if one.name.startswith("embedding") else "")


def _draw(step: Slice, inside: list[Slice], about: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bands = [(track, words) for track, words in BANDS if any(one.track == track for one in inside)]
    rows = {track: rows_of(one for one in inside if one.track == track)[:MAX_ROWS] for track, _ in bands}
    heights = [1.0 + 0.45 * (len(rows[track]) - 1) for track, _ in bands]
    figure = Figure(figsize=(14, 1.9 + 0.72 * sum(heights)), layout="constrained")
    axes = figure.add_subplot()
    length_s = step.end_s - step.begin_s
    scale, unit = (1e3, "ms") if length_s < 10 else (1.0, "s")
    seen: dict[str, str] = {}
    centres, top = [], 0.0
    for (track, _), height in zip(bands, heights, strict=True):
        band_rows = rows[track]
        row_height = (height - 0.18) / len(band_rows)
        axes.axhspan(top, top + height, color="#f8f9fa" if len(centres) % 2 else "#ffffff", zorder=0)
        for number, row in enumerate(band_rows):
            y = top + 0.09 + number * row_height
            for one in row:
                seen.setdefault(*reversed(COLOURS.get(one.kind, OTHER)))
            _draw_row(axes, row, step, scale, y, row_height * 0.92)
        centres.append(top + height / 2)
        top += height
    axes.set_ylim(top, 0)
    axes.set_xlim(0, length_s * scale)
    axes.set_yticks(centres, [words for _, words in bands], fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{unit} since the step began")
    axes.grid(True, axis="x", color="#e9ecef", zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(_title(step, inside, about), fontsize=12, loc="left")
    patches = [Patch(color=colour, label=words) for words, colour in seen.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(5, len(patches)), frameon=False, fontsize=9)
    return figure


def _draw_row(axes: Any, row: list[Slice], step: Slice, scale: float, y: float, height: float) -> None:
    """Slices as boxes; neighbours that are of one unit share its number."""
    length_s = step.end_s - step.begin_s
    for (name, kind), group in groupby(row, key=lambda one: (short_name(one), one.kind)):
        spans = []
        for one in group:
            begin_s, end_s = max(one.begin_s, step.begin_s) - step.begin_s, min(one.end_s, step.end_s) - step.begin_s
            spans.append((begin_s * scale, (end_s - begin_s) * scale))
            is_wide = (end_s - begin_s) / length_s > MIN_EDGE_SHARE
            colour = COLOURS.get(kind, OTHER)[0]
            edge = "white" if is_wide else colour
            axes.broken_barh([spans[-1]], (y, height), facecolors=colour, edgecolors=edge, linewidth=0.4, zorder=2)
        left, right = spans[0][0], spans[-1][0] + spans[-1][1]
        filled = sum(width for _, width in spans)
        if name and filled > MIN_LABEL_SHARE * length_s * scale and filled > MIN_LABEL_FILL * (right - left):
            axes.text(
                (left + right) / 2, y + height / 2, name, ha="center", va="center", fontsize=8, color="white", zorder=3
            )


def _title(step: Slice, inside: list[Slice], about: dict[str, Any]) -> str:
    busy_s = sum(min(s.end_s, step.end_s) - max(s.begin_s, step.begin_s) for s in inside if s.track == "compute")
    length_s = step.end_s - step.begin_s
    model = about.get("model", "")
    what = f"{step.name} of the streaming engine{f': {model}' if model else ''}"
    return f"{what}\n{format_s(length_s)}, of which the device computes {busy_s / length_s:.0%}"


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code: 2 for a run or step that is not there, 1 for a file that cannot be."""
    args = trace_flags().parse_args(argv)
    try:
        trace = find_trace(args.run, args.log_dir)
        png = args.png or trace.with_name("schedule.png")
        draw_schedule(trace, png, step=args.step)
    except (ValueError, OSError) as error:
        return tell_error("trace", error)
    print(f"wrote {png}")
    return 0


def find_trace(run: str, log_dir: Path) -> Path:
    """The trace of a run by its name, its log folder, any folder called like it, or the file itself. ValueError."""
    path = Path(run)
    places = [path, path / TRACE_NAME, log_dir / run / TRACE_NAME, log_dir / path.name / TRACE_NAME]
    for place in places:
        if place.is_file():
            return place
    there = ", ".join(sorted(file.parent.name for file in log_dir.glob(f"*/{TRACE_NAME}"))) or "none"
    raise ValueError(
        f"{run}: no {TRACE_NAME} there or in {log_dir / path.name}. Traced runs in {log_dir}: {there}. A run is traced "
        "when it is trained with --trace."
    )


if __name__ == "__main__":
    sys.exit(main())
