"""Moments on the device's compute stream: CUDA events on a GPU, the host's clock elsewhere; and both on one clock."""

from __future__ import annotations

import time
from typing import Any

import torch

Moment = Any
"""A timed torch.cuda.Event, or seconds on the clock of time.perf_counter."""
CALIBRATION_TRIES = 5


def moment(device: torch.device) -> Moment:
    """When the work queued so far on the current stream is over."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_s(begin: Moment, end: Moment) -> float:
    """Seconds between two moments that have passed."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


class HostTime:
    """Turns moments into host seconds (time.perf_counter), by a straight line through two calibrations.

    A calibration records an event on an idle stream between two looks at the host's clock; the closest of a few tries
    counts. Its error is half of that distance, some 10 us; two of them cancel the drift of the clocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[torch.cuda.Event, float]] = []

    def calibrate(self) -> None:
        """Waits for the device."""
        if self._device.type != "cuda":
            return
        torch.cuda.synchronize(self._device)
        best: tuple[float, torch.cuda.Event, float] | None = None
        for _ in range(CALIBRATION_TRIES):
            event = torch.cuda.Event(enable_timing=True)
            before_s = time.perf_counter()
            event.record()
            event.synchronize()
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
