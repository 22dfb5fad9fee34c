"""Reading a trial's step records."""

from __future__ import annotations

import statistics
from typing import Any


def measured_steps(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The records after the warm-up."""
    return found["steps"][found["warm_steps"] :]


def median_of(records: list[dict[str, Any]], key: str) -> float | None:
    """Median of a figure over the steps that have it."""
    values = [record[key] for record in records if record.get(key) is not None]
    return float(statistics.median(values)) if values else None
