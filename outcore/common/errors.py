"""Errors that people read: the message says what happened, why, and what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import sys
import traceback
from collections.abc import Sequence


class EngineError(RuntimeError):
    """The run cannot go on. What it saved last is intact."""


class AnswerFailed(EngineError):
    """This request cannot be answered, for what it holds; the next one can."""


def need_packages(names: Sequence[str], what_for: str, extra: str, kind: type[Exception] = RuntimeError) -> None:
    """Raise `kind` with the install line of `outcore[extra]` where one of these modules is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise kind(
            f"the packages for {what_for} are not installed ({', '.join(missing)} missing): "
            f"python setup.py --with {extra} in a clone, else pip install 'outcore[{extra}]'"
        )


def line_of(error: BaseException) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def broken_package(error: BaseException) -> str | None:
    """Words for what mends an installed package that failed while it was imported (a library of another CUDA, a half
    installation); None for any other error."""
    packages = importlib.metadata.packages_distributions().keys() - {"outcore"}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and name in packages:
            python = shlex.quote(sys.executable)
            return (
                f"{name} is installed and cannot be imported: {error}. Install it anew: `{python} -m pip install "
                f"--force-reinstall {name}`, or in a clone `rm -rf .venv && python setup.py`"
            )
    return None
