"""Commands in processes of their own: what they print goes to a file, and they outlive the panels."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from outcore.common.files import opener_for_us
from outcore.common.os_layer import apart_options, ask_to_stop
from outcore.ui.api.place import tail_of

PROGRAM = (sys.executable, "-m", "outcore.cli")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Child:
    """`outcore ARGV...`. A session of its own: Ctrl-C in the panels' terminal does not reach it."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        self.argv, self.log = list(argv), log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb", opener=opener_for_us) as output:
            self._process = subprocess.Popen(
                [*PROGRAM, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "110"},
                **apart_options(),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def end(self, patience_s: float = 10.0) -> int:
        """Ask it to end, and after `patience_s` end it. Its exit code."""
        if self.exit_code is None:
            with suppress(OSError):  # it ends just now, or has another console
                ask_to_stop(self.pid, signal.SIGTERM)
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def lines_of(log: Path) -> list[str]:
    """Read the lines that a command printed last, without colours; a line that was drawn over counts once."""
    text = _ESCAPES.sub("", tail_of(log))
    return [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def complaint_of(log: Path) -> str:
    """Why a command failed, in its own words: the last `error:` and what follows, else its last line."""
    lines = lines_of(log)
    for index in range(len(lines) - 1, -1, -1):
        head, found, rest = lines[index].partition("error: ")
        if found and (not head or head.startswith("outcore")):
            return " ".join([rest, *lines[index + 1 :]])[:2000]
    return lines[-1].removeprefix("outcore serve: ").removeprefix("outcore export: ") if lines else "it printed nothing"
