"""Progress of the set-up: one moving line on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from outcore.common.quantities import format_s

QUIET_S = 10.0
"""Seconds without a word at most, where nobody sees a moving line: in a notebook, in a log."""


class InstallProgress:
    """Named steps with a running clock. Not for several threads: one step at a time."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._is_terminal = self._out.isatty()
        self._title, self._detail, self._began_s, self._said_s = "", "", 0.0, 0.0
        self._stop: threading.Event | None = None
        self._ticker: threading.Thread | None = None

    def say(self, text: str = "") -> None:
        """A line of its own."""
        print(text, file=self._out, flush=True)

    def begin(self, title: str) -> None:
        self._title, self._detail, self._began_s = title, "", time.monotonic()
        self._said_s = self._began_s
        if not self._is_terminal:
            self.say(f"{title} ...")
            return
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, args=(self._stop,), daemon=True)
        self._ticker.start()

    def detail(self, text: str) -> None:
        """Show what the step is busy with: on a terminal's moving line, elsewhere a line every `QUIET_S`."""
        self._detail, now_s = text, time.monotonic()
        if not self._is_terminal and now_s - self._said_s >= QUIET_S:
            self._said_s = now_s
            self.say(f"{self._title} ({format_s(now_s - self._began_s)}) {text}")

    def end(self, ok: bool = True) -> None:
        if self._stop is not None and self._ticker is not None:
            self._stop.set()
            self._ticker.join()
            self._stop = self._ticker = None
            self._out.write("\r\033[K")
        took = format_s(time.monotonic() - self._began_s)
        self.say(f"{self._title}: {'done' if ok else 'FAILED'} ({took})")

    def _tick(self, stop: threading.Event) -> None:
        while not stop.wait(0.5):
            line = f"{self._title} ({format_s(time.monotonic() - self._began_s)}) {self._detail}"
            self._out.write("\r\033[K" + line[:110])
            self._out.flush()
