"""What happens within a step, as slices on tracks: the recorder behind `--trace`, and the null object it replaces.

`Trace` is what the schedule and the waits report to; lanes, optimizer threads and drive engines are listened to. Device
work is bracketed by CUDA events, everything else is told in host seconds; `slices` puts both on the host's clock.
Cost while recording: two events for each unit and micro-batch; otherwise nothing, because `NO_TRACE` is called instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch

from outcore.flow.trace.file import HostTime, Moment, Slice, moment
from outcore.optim import Ticket
from outcore.staging.lanes import CopyEvent
from outcore.storage.engines import IoRequest

MIN_WAIT_S = 10e-6
"""Shorter waits are bookkeeping and would only hide the others."""


class Trace(Protocol):
    """What is told of a step."""

    def compute(self, phase: str, unit: str, micro_batch: int) -> AbstractContextManager[None]:
        """The work queued within runs on the device: forward, head, backward of one unit on one micro-batch."""
        ...

    def host_wait(self, what: str, reason: str, begin_s: float, end_s: float) -> None:
        """The training thread was blocked."""
        ...

    def device_wait(self, what: str, reason: str, begin: Moment, end: Moment) -> None:
        """The device had nothing to compute between these moments."""
        ...


@runtime_checkable
class Traced(Protocol):
    """Who reads and writes files and tells, while somebody listens, of each request that has ended."""

    on_finished: Callable[[IoRequest, float], object] | None
    """(request, when it ended in seconds of time.perf_counter), called on whatever thread it ended."""


class NullTrace:
    """Nobody listens."""

    def compute(self, phase: str, unit: str, micro_batch: int) -> AbstractContextManager[None]:
        return _NOTHING

    def host_wait(self, what: str, reason: str, begin_s: float, end_s: float) -> None:
        return

    def device_wait(self, what: str, reason: str, begin: Moment, end: Moment) -> None:
        return


_NOTHING = nullcontext()
NO_TRACE = NullTrace()


class TraceRecorder:
    """Collects slices; the listeners are called on other threads (a list's append needs no lock)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._time = HostTime(device)
        self._told: list[Slice] = []
        self._timed: list[tuple[str, str, str, Moment, Moment, dict[str, Any]]] = []
        self._waits: list[tuple[str, str, Moment, Moment]] = []
        self._time.calibrate()

    # --- from the training thread

    @contextmanager
    def compute(self, phase: str, unit: str, micro_batch: int) -> Iterator[None]:
        begin = moment(self._device)
        try:
            yield
        finally:
            args = {"phase": phase, "unit": unit, "micro_batch": micro_batch}
            self._timed.append(("compute", unit, phase, begin, moment(self._device), args))

    def host_wait(self, what: str, reason: str, begin_s: float, end_s: float) -> None:
        if end_s - begin_s >= MIN_WAIT_S:
            self._told.append(Slice("host waits", what, f"wait {reason}", begin_s, end_s, {"for": reason}))

    def device_wait(self, what: str, reason: str, begin: Moment, end: Moment) -> None:
        if self._device.type == "cuda":  # elsewhere it is the host's
            self._waits.append((what, reason, begin, end))

    def step(self, number: int, begin_s: float, end_s: float) -> None:
        """A whole step, from its call to its return."""
        self._told.append(Slice("steps", f"step {number}", "step", begin_s, end_s, {"step": number}))

    # --- listeners, on other threads

    def copied(self, direction: str, label: str, n_bytes: int, copy: CopyEvent) -> None:
        """A lane's copy has ended."""
        self._timed.append((direction, label or direction, direction, *copy.span, {"bytes": n_bytes}))

    def updated(self, ticket: Ticket) -> None:
        """Optimizer threads have finished a unit (or a chunk of one)."""
        result = ticket.result
        if result is not None and result.status in ("done", "skipped") and result.started_s > 0:
            args = {"work": ticket.work, "status": result.status, "threads_busy_ms": result.busy_s * 1e3}
            times = (result.started_s, result.finished_s)
            self._told.append(Slice("optimizer", str(result.unit_id), str(ticket.work), *times, args))

    def moved(self, request: IoRequest, finished_s: float) -> None:
        """A drive's request has ended; it began when a thread took its first piece."""
        if not request.started_s:
            return
        n_bytes = request.view.nbytes
        args = {"file": request.file.path.name, "offset": request.offset, "bytes": n_bytes}
        if request.error is not None:
            args["error"] = str(request.error)
        name = request.file.path.parent.name  # a store's folder: states, weights, activations
        self._told.append(Slice(f"drive {request.kind}", name, request.kind, request.started_s, finished_s, args))

    # --- the result

    def slices(self) -> list[Slice]:
        """Everything so far in host seconds; waits for the device (RuntimeError when that fails)."""
        self._time.calibrate()
        found = list(self._told)
        for track, name, kind, begin, end, args in list(self._timed):
            found.append(Slice(track, name, kind, self._time.of(begin), self._time.of(end), args))
        for what, reason, begin, end in self._waits:
            begin_s, end_s = self._time.of(begin), self._time.of(end)
            if end_s - begin_s >= MIN_WAIT_S:
                found.append(Slice("device waits", what, f"wait {reason}", begin_s, end_s, {"for": reason}))
        return found
