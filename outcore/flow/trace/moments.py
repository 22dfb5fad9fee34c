"""Moments on the device's compute stream: CUDA events on a GPU, the host's clock elsewhere; and both on one clock."""

from __future__ import annotations

import time
from typing import Any

import torch

from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import format_s

Moment = Any
"""A timed torch.cuda.Event, or seconds on the clock of time.perf_counter."""
CALIBRATION_TRIES = 5
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
    """Until a moment has passed, asked for every `poll_s`: CUDA's own waits know no limit. TimeoutError."""
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
        """Until the device has reached the last `start` or `stop`; TimeoutError when it hangs."""
        if self._begun:
            wait_for(self._begun[-1][1], "the step")

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds, summed over its parts. Waits for the device to reach `stop`."""
        total: dict[str, float] = {}
        self.wait()
        for (phase, begin), (_, end) in zip(self._begun, self._begun[1:], strict=False):
            total[phase] = total.get(phase, 0.0) + elapsed_s(begin, end)
        return total
