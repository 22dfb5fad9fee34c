"""Two evaluations of the history: what they were made under, and what came out."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from outcore.evaluate.history.comparison import compare
from outcore.evaluate.history.database import History

Record = dict[str, Any]


def diff_of(history: History, first: Record, second: Record) -> Record:
    """Settings that differ, and every metric that both have."""
    settings: dict[str, list[Any]] = {}
    for part in ("settings", "launch", "versions"):
        for name in sorted({*first[part], *second[part]}):
            values = [first[part].get(name), second[part].get(name)]
            if values[0] != values[1]:
                settings[name] = values
    for name in ("model", "model_hash"):
        if first[name] != second[name]:
            settings[name] = [first[name], second[name]]
    tasks = compare(first["scores"], history.samples(first["id"]), second["scores"], history.samples(second["id"]))
    return {"a": first["id"], "b": second["id"], "settings": settings, "tasks": [asdict(one) for one in tasks]}
