"""Errors that people read: the message says what happened, why, and what to do."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The run cannot go on. What it saved last is intact."""


def line_of(error: BaseException) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
