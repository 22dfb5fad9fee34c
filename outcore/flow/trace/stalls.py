"""Waits of a step: where, and for what: `stall_pcie`, `stall_nvme` and `stall_optimizer` of a metrics line.

A *stall* is time in which the device had nothing to compute because something that its next piece of work needs was
not there. Each such place in the schedule is bracketed by `until`, which puts a moment on the device's compute stream
before and after: the time between them is the stall, whatever the host did meanwhile. Within it the host may be
blocked; the places that block say why (`because`), and the stall is shared out to those reasons first, the rest counts
for what `until` was told. So a host that waits while the device still has queued work counts nothing. Without a GPU
both clocks are the host's. Cost: two CUDA events for each place (about 130 a step for 32 layers), read after the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from outcore.flow.trace.file import Moment, elapsed_s, moment
from outcore.flow.trace.recorder import NO_TRACE, Trace

Reason = Literal["pcie", "nvme", "optimizer"]
"""pcie: a copy between RAM and the device; nvme: the drive; optimizer: an update on the CPU."""


@dataclass
class _Stall:
    reason: Reason
    begin: Moment
    end: Moment | None = None
    told_s: float = 0.0
    """Until when (host seconds) the trace has been told what it was waiting for."""
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
        """The wait told last was none: the device had other work meanwhile."""
        self._stalls.pop()

    @contextmanager
    def because(self, reason: Reason, what: str) -> Iterator[None]:
        """The host blocks here for this reason, within an `until` or (draining) outside of any."""
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
        """The host was blocked for so long, told afterwards; below 0 takes back what was for another reason."""
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
