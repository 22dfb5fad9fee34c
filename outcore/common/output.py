"""Output of a program when nobody reads any more: `| head` has its lines, a terminal was closed, `tee` was killed,
the drive below a log file is full."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any

from outcore.common.system_errors import describe_errno

EXIT_CODE = 128 + 13
"""A shell expects it of a process that SIGPIPE ended; by its number, because Windows has no such signal."""
STARTING = "starting: torch and transformers are imported ..."
"""Said by `told_when_slow` of a command whose room is being opened."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys instead of showing them, but for line breaks and tabs; the last two ranges turn the
direction of what is around them."""


def printable(text: str) -> str:
    """Spell out control characters (`\\x1b`): a row or an answer must not colour, clear or type into a terminal."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def show(text: str) -> None:
    """Print a piece of an answer at once; as it is into a file or a pipe, `printable` on a terminal."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def say(line: str) -> None:
    """Tell people something beside the result: a line on standard error, at once."""
    print(printable(line), file=sys.stderr, flush=True)


@contextlib.contextmanager
def told_when_slow(line: str) -> Iterator[None]:
    """Tell a person at a terminal what takes so long, once it has taken a second: imports do, before a command can say
    anything itself. Into a file or a pipe nothing is said."""
    timer = threading.Timer(1.0, say, (line,))
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
    """A standard stream that outlives its reader and a full drive, or ends the program with them."""

    def __init__(self, real: IO[str], name: str, *, ends: bool) -> None:
        self._real, self._name = real, name
        self._ends = ends

    def write(self, text: str) -> int:
        try:
            return self._real.write(text)
        except OSError as error:
            self._is_lost(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._real.flush()
        except OSError as error:
            self._is_lost(error)

    def _is_lost(self, error: OSError) -> None:
        drop_output(self._real)
        reader_left = isinstance(error, BrokenPipeError)
        if not reader_left and self._name == "stdout":
            more = "" if self._ends else " What is printed from here on is lost; the rest goes on."
            say(f"standard output cannot be written: {describe_errno(error.errno)}.{more}")
        if self._ends:  # no OSError, which a command might take for one of its files
            raise SystemExit(EXIT_CODE if reader_left else 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def watch_reader(*, ends: bool) -> None:
    """From now on a reader of standard output that leaves ends this program quietly (`ends`), or what is printed goes
    nowhere; a drive that is full under it is said, and ends it with 1 or not likewise. Standard error never does.

    Leaves a stream alone that somebody else has taken (a test, a notebook)."""
    _open_closed()
    for stream in (sys.stdout, sys.stderr):  # names of files that are no UTF-8, letters that LANG=C has not
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _Output(sys.stdout, "stdout", ends=ends)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _Output(sys.stderr, "stderr", ends=False)


def _open_closed() -> None:
    """Open what was closed when the program began (`>&-`) to nowhere: the next file would get its number, and what
    libraries print there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, f"__{name}__") is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, nowhere == number)
            stream = open(nowhere, "w" if number else "r")  # noqa: SIM115 - as long as the program
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
