"""Waits of a step: where, and for what: `stall_pcie`, `stall_nvme` and `stall_optimizer` of a metrics line.

A *stall* is time in which the device had nothing to compute because something that its next piece of work needs was
not there. Each such place in the schedule is bracketed by `until`, which puts a moment on the device's compute stream
before and after: the time between them is the stall, whatever the host did meanwhile. Within it the host may be
blocked; the places that block say why (`because`), and the stall is shared out to those reasons first, the rest counts
for what `until` was told. So a host that waits while the device still has queued work counts nothing. Without a GPU
both clocks are the host's. Cost: two CUDA events for each place (about 130 a step for 32 layers), read after the step.

What happens within a step, as slices on tracks: the recorder behind `--trace`, and the null object it replaces.

`Trace` is what the schedule and the waits report to; lanes, optimizer threads and drive engines are listened to. Device
work is bracketed by CUDA events, everything else is told in host seconds; `slices` puts both on the host's clock.
Cost while recording: two events for each unit and micro-batch; otherwise nothing, because `NO_TRACE` is called instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch

from outcore.flow.trace.file import HostTime, Moment, Slice, elapsed_s, moment
from outcore.optim import Ticket
from outcore.staging.lanes import CopyEvent
from outcore.storage.engines import IoRequest

MIN_WAIT_S = 10e-6
"""Shorter waits are bookkeeping and would only hide the others."""


class Trace(Protocol):
    """Listener that is told of the events of a step."""

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
    """Reader or writer of files that tells, while somebody listens, of each request that has ended."""

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


Reason = Literal["pcie", "nvme", "optimizer"]
"""pcie: a copy between RAM and the device; nvme: the drive; optimizer: an update on the CPU."""


@dataclass
class _Stall:
    reason: Reason
    begin: Moment
    end: Moment | None = None
    told_s: float = 0.0
    """Host time in seconds up to which waits were reported to the trace."""
    host_s: dict[Reason, float] = field(default_factory=dict)


class BusyTime:
    """Seconds in which at least one of several things was going on; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._since_s, self._total_s = 0, 0.0, 0.0

    def begins(self) -> None:
        """One more."""
        with self._lock:
            if not self._count:
                self._since_s = time.perf_counter()
            self._count += 1

    def ends(self) -> None:
        """One less."""
        with self._lock:
            self._count -= 1
            if not self._count:
                self._total_s += time.perf_counter() - self._since_s

    def total_s(self) -> float:
        """Up to now."""
        with self._lock:
            return self._total_s + (time.perf_counter() - self._since_s if self._count else 0.0)


class Stalls:
    """Waits of a step, by reason. Called from the training thread. `trace` sees every wait."""

    def __init__(self, device: torch.device) -> None:
        self.trace: Trace = NO_TRACE
        self._device = device
        self._stalls: list[_Stall] = []
        self._before: list[_Stall] = []
        """Waits of the pass before, whose end may lie behind the next one's beginning."""
        self._open: _Stall | None = None

    def begin(self) -> None:
        """A pass begins: nothing has been waited for."""
        self._before, self._stalls = self._stalls, []

    @contextmanager
    def until(self, what: str, reason: Reason) -> Iterator[None]:
        """The device's next work needs `what`, which is made to be there meanwhile."""
        stall = self._open = _Stall(reason, moment(self._device), told_s=time.perf_counter())
        try:
            yield
        finally:
            self._open = None
            stall.end = moment(self._device)
            self._stalls.append(stall)
            self.trace.host_wait(what, reason, stall.told_s, time.perf_counter())
            self.trace.device_wait(what, reason, stall.begin, stall.end)

    def withdraw(self) -> None:
        """Forget the last wait: the device had other work meanwhile, so it did not stall."""
        self._stalls.pop()

    @contextmanager
    def because(self, reason: Reason, what: str) -> Iterator[None]:
        """Count this context's time as blocked for this reason. It lies within an `until`, or in a step's draining."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            end_s = time.perf_counter()
            self.add(reason, end_s - begin_s)
            if self._open is not None:
                self._open.told_s = end_s
            self.trace.host_wait(what, reason, begin_s, end_s)

    def add(self, reason: Reason, seconds: float) -> None:
        """Count time that the host was blocked, afterwards. Negative seconds take back time of another reason."""
        if self._open is not None:
            self._open.host_s[reason] = max(0.0, self._open.host_s.get(reason, 0.0) + seconds)

    def seconds(self, *, before: bool = False) -> dict[str, float]:
        """stall_<reason> -> seconds since `begin`; `before`: between the two last ones. The device must have passed the
        last of them."""
        total = dict.fromkeys(get_args(Reason), 0.0)
        for stall in self._before if before else self._stalls:
            assert stall.end is not None
            left_s = elapsed_s(stall.begin, stall.end)
            blocked_s = sum(stall.host_s.values())
            share = min(1.0, left_s / blocked_s) if blocked_s > 0 else 0.0
            for reason, seconds in stall.host_s.items():
                total[reason] += seconds * share
            total[stall.reason] += max(0.0, left_s - blocked_s)
        return {f"stall_{reason}": seconds for reason, seconds in total.items()}
