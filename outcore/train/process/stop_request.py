"""Ctrl-C and SIGTERM ask the run to stop: it finishes its step, saves, and says how to resume.

A second Ctrl-C stops at once; the last checkpoint is still intact. With several ranks all agree before stopping.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType, TracebackType
from typing import Any

import torch


class StopRequest:
    """Context manager that catches SIGINT and SIGTERM; `wanted()` tells, on all ranks alike, whether one came."""

    def __init__(self, world_size: int = 1, device: torch.device | None = None) -> None:
        self._world_size = world_size
        self._device = device or torch.device("cpu")
        self.signal: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = signal.Signals(number)
            sys.stderr.write(f"\n{self.signal.name}: finishing this step, then saving (Ctrl-C again stops at once)\n")

    def wanted(self) -> bool:
        """True on every rank as soon as one rank was asked to stop."""
        if self._world_size == 1:
            return self.signal is not None
        flag = torch.tensor(int(self.signal or 0), device=self._device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        number = int(flag)
        if number and self.signal is None:
            self.signal = signal.Signals(number)
        return number != 0

    @property
    def exit_code(self) -> int:
        """What the shell expects of a process that a signal ended: 128 + its number."""
        return 128 + int(self.signal) if self.signal else 0
