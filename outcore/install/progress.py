"""What the set-up is doing right now, in plain lines."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from outcore.common.quantities import format_s


class InstallProgress:
    """Named steps with the time they took, one at a time."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._title, self._detail, self._began_s = "", "", 0.0

    def say(self, text: str = "") -> None:
        """Print a line of its own."""
        print(text, file=self._out, flush=True)

    def begin(self, title: str) -> None:
        """Name the step that starts now."""
        self._title, self._detail, self._began_s = title, "", time.monotonic()
        self.say(f"{title} ...")

    def detail(self, text: str) -> None:
        """Tell what the step is busy with, once for each change."""
        if text != self._detail:
            self._detail = text
            self.say(f"    {text}")

    def end(self, ok: bool = True) -> None:
        """Tell how the step ended and how long it took."""
        took = format_s(time.monotonic() - self._began_s)
        self.say(f"{self._title}: {'done' if ok else 'FAILED'} ({took})")
