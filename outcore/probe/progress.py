"""Progress on stderr: a bar on a terminal (rich), a plain line per stage otherwise, so that logs stay readable."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO


class StageProgress:
    """`stage` begins one of `stages`, `tick` says what it is doing right now. A context manager."""

    def __init__(self, stages: Sequence[str], stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._stages = list(stages)
        self._start_s = time.monotonic()
        self._bar = self._task = None
        if self._stream.isatty():
            self._start_bar()

    def _start_bar(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        except ImportError:  # rich is a convenience: plain lines say the same
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
        self._task = self._bar.add_task("starting", total=len(self._stages))
        self._bar.start()

    def stage(self, name: str) -> None:
        """Begin this stage: those before it are done (or left out), this one begins. ValueError for an unknown name."""
        number = self._stages.index(name) + 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=number - 1, description=name)
        else:
            elapsed_s = time.monotonic() - self._start_s
            print(f"[{number}/{len(self._stages)}] {elapsed_s:5.1f} s  {name}", file=self._stream, flush=True)

    def tick(self, what: str) -> None:
        """What is being measured now; shown on a terminal only."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what)

    def __enter__(self) -> StageProgress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()
