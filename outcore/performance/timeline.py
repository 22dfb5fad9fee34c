"""Timeline: what every tier holds within a step, looked at some fifty times a second by a thread.

Cheap readings only: the allocator's own counters, /proc/self/statm, the block device's counters. Cost per look about
50 us of a thread that sleeps otherwise.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

from outcore.monitor.sensors import BlockDevice

INTERVAL_S = 0.02
MOST_POINTS = 4000
"""After that the newest points are left out: a minute and more, far beyond the steps that are drawn."""


class Timeline:
    """Records while it is open. `drive`: a path on the drive to watch."""

    def __init__(self, drive: Path | str) -> None:
        self.points: list[dict[str, float]] = []
        self.marks: list[float] = []
        """When a step ended."""
        self._cuda = torch.cuda.is_available()
        self._page_bytes = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outcore-timeline", daemon=True)
        self._start_s = 0.0
        try:
            self._device: BlockDevice | None = BlockDevice(drive)
        except (OSError, ValueError):  # no block device under it (a network or memory file system)
            self._device = None

    def __enter__(self) -> Timeline:
        self._start_s = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(timeout=2.0)

    def mark(self) -> None:
        """A step has ended."""
        self.marks.append(time.perf_counter() - self._start_s)

    def _run(self) -> None:
        while not self._over.wait(INTERVAL_S) and len(self.points) < MOST_POINTS:
            self.points.append(self._look())

    def _look(self) -> dict[str, float]:
        point: dict[str, float] = {"t_s": time.perf_counter() - self._start_s}
        if self._cuda:
            point["gpu_tensors_bytes"] = torch.cuda.memory_allocated()
            point["gpu_reserved_bytes"] = torch.cuda.memory_reserved()
        try:
            point["rss_bytes"] = int(Path("/proc/self/statm").read_text().split()[1]) * self._page_bytes
        except OSError:  # not Linux
            pass
        if self._device is not None:
            try:
                counters = self._device.read()
                point["drive_read_bytes"], point["drive_write_bytes"] = counters.read_bytes, counters.write_bytes
            except (OSError, ValueError):
                self._device = None
        return point
