"""Evaluations as text: a table for people, CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
COLUMNS = ("id", "created", "status", "model", "model_hash", "task", "version", "metric", "filter", "value", "stderr")
SETTINGS = ("limit", "num_fewshot", "apply_chat_template", "system_instruction", "gen_kwargs", "seed")


def as_csv(records: Iterable[Record]) -> str:
    """A line for each score, with what it was measured under."""
    out = io.StringIO()
    writer = csv.writer(out)
    launch = ("world_size", "tensor_parallel", "pipeline_parallel", "device", "precision", "preset")
    writer.writerow([*COLUMNS, "documents", *SETTINGS, *launch, "lm_eval", "seconds"])
    for record in records:
        for score in record["scores"]:
            head = [record["id"], when(record["created_at"]), record["status"], record["model"], record["model_hash"]]
            of_score = [score[name] for name in (*COLUMNS[5:], "documents")]
            settings = [record["settings"].get(name) for name in SETTINGS]
            of_launch = [record["launch"].get(name) for name in launch]
            writer.writerow(
                [*head, *of_score, *settings, *of_launch, record["versions"].get("lm_eval"), record["seconds"]]
            )
    return out.getvalue()


def as_table(rows: Sequence[Sequence[Any]], head: Sequence[str]) -> str:
    """Columns of equal width; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    is_number = [
        bool(rows) and all(isinstance(row[column], (int, float)) or row[column] is None for row in rows)
        for column in range(len(head))
    ]
    lines = [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines)


def when(seconds: float) -> str:
    """A moment, in local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
