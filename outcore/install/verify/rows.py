"""One row of the verification: a part, what was found, what is needed, and the command that mends it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

OK, DEGRADED, MISSING = "OK", "degraded", "missing"


@dataclass(frozen=True)
class ReportRow:
    part: str
    found: str
    needed: str
    status: str
    """OK | degraded (works, with less) | missing (does not work)."""
    required: bool
    """Whether training is impossible without it: a required row that is missing makes the exit code 1."""
    fix: str = ""
    """The command (or the one instruction) that mends it; empty when nothing needs mending."""

    def __post_init__(self) -> None:
        if self.status not in (OK, DEGRADED, MISSING):
            raise ValueError(f"row {self.part}: status {self.status!r} is none of {OK}, {DEGRADED}, {MISSING}")

    @property
    def holds(self) -> bool:
        return self.status != MISSING or not self.required

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def all_hold(rows: list[ReportRow]) -> bool:
    """Whether every required row holds; an empty report does not."""
    return bool(rows) and all(row.holds for row in rows)
