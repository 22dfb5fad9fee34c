"""trace.json: slices of time on tracks in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

Slices of one track that overlap (reads in flight, optimizer threads on two units) get rows of their own: viewers show
the slices of a row as nested, and would draw overlapping ones wrongly. Times are microseconds from the trace's begin.

Moments on the device's compute stream: CUDA events on a GPU, the host's clock elsewhere; and both on one clock."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outcore.common import write_atomic
from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import format_s

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
    """Category, by which viewers colour and filter."""
    begin_s: float
    end_s: float
    """End of the slice in seconds of any clock, the same for all slices."""
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


Moment = Any
"""A timed torch.cuda.Event, or seconds on the clock of time.perf_counter."""
CALIBRATION_TRIES = 5  # the tightest of them counts: the host may be interrupted in some
POLL_S = 1e-4


def moment(device: torch.device) -> Moment:
    """When the work queued so far on the device's current stream is over."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def has_passed(at: Moment) -> bool:
    return isinstance(at, float) or at.query()


def wait_for(at: Moment, what: str, timeout_s: float = TIMEOUT_S, poll_s: float = POLL_S) -> None:
    """Wait until a moment has passed, polling every `poll_s`: CUDA's own waits have no limit. Raises TimeoutError."""
    end_s = time.perf_counter() + timeout_s
    while not has_passed(at):
        if time.perf_counter() > end_s:
            raise TimeoutError(
                f"the GPU did not finish {what} within {format_s(timeout_s)}: it hangs, or other processes keep it "
                "busy (`nvidia-smi` shows them; after a fault the kernel's log has lines with Xid)"
            )
        time.sleep(poll_s)


def elapsed_s(begin: Moment, end: Moment) -> float:
    """Seconds between two moments that have passed."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


class HostTime:
    """Turns moments into host seconds (time.perf_counter), by a straight line through two calibrations.

    A calibration records an event on an idle stream between two looks at the host's clock; the closest of a few tries
    counts. Its error is half of that distance, some 10 us; two of them cancel the drift of the clocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[torch.cuda.Event, float]] = []

    def calibrate(self) -> None:
        """Waits for the device."""
        if self._device.type != "cuda":
            return
        wait_for(moment(self._device), "what was queued before the trace")
        best: tuple[float, torch.cuda.Event, float] | None = None
        for _ in range(CALIBRATION_TRIES):
            before_s = time.perf_counter()
            event = moment(self._device)
            wait_for(event, "the moment of a calibration", poll_s=0.0)
            after_s = time.perf_counter()
            if best is None or after_s - before_s < best[0]:
                best = (after_s - before_s, event, (before_s + after_s) / 2)
        assert best is not None
        self._pairs.append(best[1:])

    def of(self, at: Moment) -> float:
        """Host seconds of a moment that has passed; after at least one calibration."""
        if isinstance(at, float):
            return at
        first, first_s = self._pairs[0]
        device_s = elapsed_s(first, at)
        last, last_s = self._pairs[-1]
        span_s = elapsed_s(first, last) if last is not first else 0.0
        rate = (last_s - first_s) / span_s if span_s > 0 else 1.0
        return first_s + device_s * rate


class PhaseClock:
    """Seconds by phase of a step: `start` a phase ends the one before, `stop` the last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: list[tuple[str, Moment]] = []

    def start(self, phase: str) -> None:
        self._begun.append((phase, moment(self._device)))

    def stop(self) -> None:
        self.start("")

    def wait(self) -> None:
        """Wait until the device has reached the last `start` or `stop`. Raises TimeoutError when it hangs."""
        if self._begun:
            wait_for(self._begun[-1][1], "the step")

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds, summed over its parts. Waits for the device to reach `stop`."""
        total: dict[str, float] = {}
        self.wait()
        for (phase, begin), (_, end) in zip(self._begun, self._begun[1:], strict=False):
            total[phase] = total.get(phase, 0.0) + elapsed_s(begin, end)
        return total
