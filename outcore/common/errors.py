"""Errors that people read: the message says what happened, why, and what to do."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence


class EngineError(RuntimeError):
    """The run cannot go on. What it saved last is intact."""


def need_packages(names: Sequence[str], what_for: str, requirements: str) -> None:
    """RuntimeError with the install line where one of these modules is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"the packages for {what_for} are not installed ({', '.join(missing)} missing): "
            f"python setup.py --with {requirements} in a clone, else pip install 'outcore[{requirements}]'"
        )


def line_of(error: BaseException) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
