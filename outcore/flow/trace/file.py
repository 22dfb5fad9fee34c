"""trace.json: slices of time on tracks in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

Slices of one track that overlap (reads in flight, optimizer threads on two units) get rows of their own: viewers show
the slices of a row as nested, and would draw overlapping ones wrongly. Times are microseconds from the trace's begin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outcore.common import write_atomic

TRACKS = (
    *("steps", "compute", "device waits", "host waits", "optimizer", "upload", "download", "drive read"),
    *("drive write",),
)
"""From top to bottom."""
PROCESS_ID = 1


@dataclass(frozen=True)
class Slice:
    """Something that lasted."""

    track: str
    name: str
    kind: str
    """What it is coloured and filtered by."""
    begin_s: float
    end_s: float
    """On any clock, the same for all slices."""
    args: dict[str, Any] = field(default_factory=dict)


def rows_of(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Each slice in the first row whose slices are over when it begins."""
    rows: list[list[Slice]] = []
    for one in sorted(slices, key=lambda s: (s.begin_s, -s.end_s)):
        row = next((row for row in rows if row[-1].end_s <= one.begin_s), None)
        if row is None:
            rows.append([one])
        else:
            row.append(one)
    return rows


def trace_events(slices: Sequence[Slice]) -> list[dict[str, Any]]:
    """Metadata and one complete event ("X") for each slice, in order of time within each row."""
    begin_s = min((one.begin_s for one in slices), default=0.0)
    events = [_named("process_name", 0, {"name": "outcore"})]
    row_id = 0
    tracks = sorted({one.track for one in slices}, key=lambda t: (TRACKS.index(t) if t in TRACKS else len(TRACKS), t))
    for track in tracks:
        for number, row in enumerate(rows_of(one for one in slices if one.track == track)):
            row_id += 1
            name = track if number == 0 else f"{track} {number + 1}"
            events.append(_named("thread_name", row_id, {"name": name}))
            events.append(_named("thread_sort_index", row_id, {"sort_index": row_id}))
            for one in row:
                event = {"name": one.name, "cat": one.kind, "ph": "X", "pid": PROCESS_ID, "tid": row_id}
                event |= {"ts": (one.begin_s - begin_s) * 1e6, "dur": max(0.0, one.end_s - one.begin_s) * 1e6}
                events.append({**event, "args": {"track": track, **one.args}})
    return events


def _named(what: str, row_id: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": PROCESS_ID, "tid": row_id, "ts": 0, "args": args}


def write_trace(path: Path, slices: Sequence[Slice], about: dict[str, Any]) -> None:
    """Write `path`, replacing it whole. `about`: what was traced, for people and for the picture. OSError."""
    text = json.dumps({"traceEvents": trace_events(slices), "displayTimeUnit": "ms", "otherData": about})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def read_trace(path: Path) -> tuple[list[Slice], dict[str, Any]]:
    """(slices in seconds from the trace's begin, about). ValueError for a file that is no trace of ours."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        events = [event for event in data["traceEvents"] if event["ph"] == "X"]
        found = [
            Slice(
                event["args"]["track"],
                event["name"],
                event["cat"],
                event["ts"] / 1e6,
                (event["ts"] + event["dur"]) / 1e6,
                {name: value for name, value in event["args"].items() if name != "track"},
            )
            for event in events
        ]
        return found, dict(data.get("otherData", {}))
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a trace of this program ({error!r}): make one with --trace") from error
