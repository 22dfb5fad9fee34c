"""What a program prints when nobody reads any more: `| head` has its lines, a terminal was closed, `tee` was killed."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO, Any

EXIT_CODE = 128 + 13
"""A shell expects it of a process that SIGPIPE ended; by its number, because Windows has no such signal."""


def say(line: str) -> None:
    """Tell people something beside the result: a line on standard error, at once."""
    print(line, file=sys.stderr, flush=True)


def tell_error(command: str, error: Exception) -> int:
    """Say why a subcommand ends; its exit code: 2 for what was asked (a ValueError), 1 for what failed on the way."""
    say(f"outcore {command}: {error}")
    return 2 if isinstance(error, ValueError) else 1


def drop_output(*streams: IO[str]) -> None:
    """Have what is printed from now on go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):  # no descriptor of its own
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Output:
    """Standard output that outlives its reader, or ends the program with it and without a word."""

    def __init__(self, real: IO[str], *, ends: bool) -> None:
        self._real = real
        self._ends = ends

    def write(self, text: str) -> int:
        try:
            return self._real.write(text)
        except BrokenPipeError:
            self._reader_left()
            return len(text)

    def flush(self) -> None:
        try:
            self._real.flush()
        except BrokenPipeError:
            self._reader_left()

    def _reader_left(self) -> None:
        drop_output(self._real)
        if self._ends:
            raise SystemExit(EXIT_CODE)  # no OSError, which a command might take for one of its files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def watch_reader(*, ends: bool) -> None:
    """From now on a reader that leaves ends this program quietly (`ends`), or what is printed goes nowhere.

    Does nothing where somebody else has taken standard output (a test, a notebook)."""
    if sys.stdout is sys.__stdout__:
        sys.stdout = _Output(sys.stdout, ends=ends)
