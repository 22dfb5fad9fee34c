"""Against the last test on this machine: the same run, figure by figure; more than a tenth worse is a regression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outcore.common.files import read_object
from outcore.performance.findings import SCHEMA_VERSION, Regression

WORSE = 0.10
LEAST_S = 0.2
"""Times below it are noise."""
MACHINE_RATES = ("_gb_per_s", "_tflops", "_gparams_per_s")
HIGHER_IS_BETTER = ("tokens_per_s", *MACHINE_RATES)


def last_report(path: Path) -> dict[str, Any] | None:
    """The report that is there; None when there is none or it cannot be read."""
    record = read_object(path)
    return record if record.get("schema_version") == SCHEMA_VERSION else None


def compared(
    last: dict[str, Any] | None, run_key: dict[str, Any], machine_key: dict[str, Any], figures: dict[str, Any]
) -> tuple[list[Regression], str]:
    """(what got worse, with which test it was compared or why with none)."""
    if last is None:
        return [], "no earlier test here"
    if last["machine_key"] != machine_key:
        return [], "the last test was made on another machine"
    before = last["figures"]
    same_run = last["run_key"] == run_key
    names = [name for name in figures if name in before and (same_run or name.endswith(MACHINE_RATES))]
    found = [
        Regression(name, before[name], figures[name]) for name in names if _is_worse(name, before[name], figures[name])
    ]
    words = last["created_at"] if same_run else f"{last['created_at']} (another run: the machine's own rates only)"
    return found, words


def _is_worse(name: str, before: Any, now: Any) -> bool:
    if not isinstance(before, int | float) or not isinstance(now, int | float) or before <= 0:
        return False
    if name.endswith(HIGHER_IS_BETTER):
        return now < before * (1 - WORSE)
    if name.endswith("_s") and max(before, now) < LEAST_S:
        return False
    return now > before * (1 + WORSE)
