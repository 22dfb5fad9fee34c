"""Findings of a probe, one line of JSON before and one after each trial."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path


class ProbeRecorder:
    """Runs trials and writes down what became of them. A trial returns what it found, or raises."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def try_part(self, part: str, trial: Callable[[], str]) -> bool:
        self._write({"part": part, "state": "begun"})
        began_s = time.monotonic()
        try:
            found, ok, why = trial(), True, ""
        except Unneeded as reason:
            found, ok, why = str(reason), True, "unneeded"
        except Exception as error:  # every failure of a part is a finding
            lines = str(error).strip().splitlines() or ["no message"]
            found, ok, why = "", False, f"{type(error).__name__}: {lines[0]}"
        took_s = round(time.monotonic() - began_s, 2)
        self._write({"part": part, "state": "done", "ok": ok, "found": found, "why": why, "took_s": took_s})
        return ok

    def _write(self, record: dict[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")


class Unneeded(Exception):
    """A part that this machine has no use for; the message says why."""
