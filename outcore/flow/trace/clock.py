"""Seconds by phase of a step: CUDA events on a GPU (read once, after the step), the host's clock elsewhere."""

from __future__ import annotations

import time

import torch

from outcore.flow.trace.moments import wait_for


class PhaseClock:
    """`start` a phase ends the one before; `stop` ends the last."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._times: list[tuple[str, float]] = []

    def start(self, phase: str) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((phase, event))
        else:
            self._times.append((phase, time.perf_counter()))

    def stop(self) -> None:
        self.start("")

    def wait(self) -> None:
        """Until the device has reached the last `start` or `stop`; TimeoutError when it hangs."""
        if self._cuda and self._events:
            wait_for(self._events[-1][1], "the step")

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds, summed over its parts. Waits for the device to reach `stop`."""
        total: dict[str, float] = {}
        self.wait()
        for (phase, begin), (_, end) in zip(self._events, self._events[1:], strict=False):
            total[phase] = total.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
        for (phase, begin_s), (_, end_s) in zip(self._times, self._times[1:], strict=False):
            total[phase] = total.get(phase, 0.0) + end_s - begin_s
        return total
