"""Signals that ask the run to stop (`stop_signals`): it finishes its step, saves, and says how to resume.

SIGHUP is what a closed terminal or a dropped ssh sends: the screen may be gone with it, so output that fails from then
on goes nowhere instead of ending the run. Under nohup it stays ignored. A second Ctrl-C stops at once; the last
checkpoint is still intact. torchrun passes on to its ranks a Ctrl-C that the terminal has sent them already: that is no
second one. After the last step there is nothing to save: the export is finished and the run ends with
0. With several ranks all agree before stopping."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch

from outcore.common.os_layer import stop_signals
from outcore.common.output import drop_output

PASSED_ON_S = 2.0
"""Within this time of the first signal, SIGINT under torchrun is a copy of the terminal's; it takes milliseconds."""


class StopRequest:
    """Context manager that catches `stop_signals`; `wanted()` tells, on all ranks alike, if one came."""

    def __init__(self, world_size: int = 1, device: torch.device | None = None) -> None:
        self._world_size = world_size
        self._device = device or torch.device("cpu")
        self.signal: signal.Signals | None = None
        self.finishing = "finishing this step, then saving"
        """Words for what is still done when a signal comes."""
        self._came_s = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python gives signals to the main thread alone, whose program decides
        for number in stop_signals():
            if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_copy = "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._came_s < PASSED_ON_S
        if self.signal is not None and number == signal.SIGINT and not is_copy:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal, self._came_s = signal.Signals(number), time.monotonic()
            words = f"\n{self.signal.name}: {self.finishing} (Ctrl-C again stops at once)\n"
            try:
                sys.stderr.write(words)
                sys.stderr.flush()
            except (OSError, ValueError):  # the terminal is gone
                drop_output(sys.stdout, sys.stderr)

    def wanted(self) -> bool:
        """True on every rank as soon as one rank was asked to stop."""
        if self._world_size == 1:
            return self.signal is not None
        flag = torch.tensor(int(self.signal or 0), device=self._device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        number = int(flag)
        if number and self.signal is None:  # this rank's own is on its way
            self.signal, self._came_s = signal.Signals(number), time.monotonic()
        return number != 0

    @property
    def exit_code(self) -> int:
        """Exit code that the shell expects of a process that a signal ended: 128 + its number; 0 without one."""
        return 128 + int(self.signal) if self.signal else 0
