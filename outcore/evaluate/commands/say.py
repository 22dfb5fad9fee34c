"""What the commands print for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outcore.common.output import say
from outcore.common.quantities import counted
from outcore.evaluate.history import as_table


def say_event(event: dict[str, Any]) -> None:
    """One event, in a line."""
    kind = event["event"]
    if kind in ("stage", "progress"):
        left = f", {event['left_s']:.0f} s left" if event.get("left_s") else ""
        documents = (
            f" {event['documents_done']:,} of {counted(event['documents'], 'document')}" if event["documents"] else ""
        )
        say(f"{event['task'] or 'suite'}: {event['stage']}{documents}{left}")
    elif kind == "score":
        error = "" if event["stderr"] is None else f" ± {event['stderr']:.4f}"
        say(f"{event['task']}: {event['metric']} {event['value']:.6g}{error}")
    elif event.get("message"):
        say(f"{kind}: {event['message']}")


def table_of(scores: Sequence[dict[str, Any]]) -> str:
    """Scores in columns."""
    rows = [
        (s["task"], s["version"], s["metric"], s["filter"], s["documents"], float(s["value"]), s["stderr"])
        for s in scores
    ]
    return as_table(rows, ("task", "version", "metric", "filter", "documents", "value", "stderr"))
