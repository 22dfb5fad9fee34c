"""Metrics: reads metrics.jsonl, whole or as it grows, and forgives what a killed run leaves behind.

`poll()` reads only what was appended since the last call; a file that was replaced or cut (a resumed run) is read again
from its start. Torn and damaged lines are skipped and counted. Cost: one pass over the bytes; records stay in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outcore.monitor.metrics.log import parse_line


def numbers(records: Iterable[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, figure) of the records in which `key` is a figure."""
    return [(record.get("step", 0), record[key]) for record in records if isinstance(record.get(key), (int, float))]


class Metrics:
    """The lines of one metrics.jsonl by kind.

    Raises (by `poll`):
        FileNotFoundError: no such file; the message says where it was sought."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._clear()

    def _clear(self) -> None:
        self.header: dict[str, Any] = {}
        """The newest header: line 0, updated by what resumed processes wrote."""
        self.steps: list[dict[str, Any]] = []
        """Lines by rising step, each step once."""
        self.evals: list[dict[str, Any]] = []
        self.resumed_at: list[int] = []
        """Steps after which a later process went on."""
        self.num_damaged = 0
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    @property
    def total_steps(self) -> int | None:
        """The last step of the run, from the header (top level or its plan)."""
        plan = self.header.get("plan")
        total = self.header.get("total_steps") or (plan.get("total_steps") if isinstance(plan, dict) else None)
        return total if isinstance(total, int) and total > 0 else None

    @property
    def machine(self) -> dict[str, Any]:
        """The header's machine: sizes of the tiers (`Sampler.describe()`), `links` where they were measured."""
        machine = self.header.get("machine")
        return machine if isinstance(machine, dict) else {}

    @property
    def model_name(self) -> str | None:
        """The model in words."""
        model = self.header.get("model")
        if isinstance(model, dict):
            model = model.get("name") or model.get("words")
        return None if model is None else str(model)

    def poll(self) -> bool:
        """Read what is new; True if anything was."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115  (the error text below must not hide others in a with block)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self.path} does not exist: the run has not written a step yet, or it is another run's folder."
            ) from None
        with file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            changed = False
            if self._identity != identity or status.st_size < self._offset:
                changed = self._identity is not None
                self._clear()
                self._identity = identity
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # being written, or torn: looked at again at the next poll
                self._offset += len(line)
                changed = True
                self._add(line)
        return changed

    def _add(self, line: bytes) -> None:
        record = parse_line(line)
        if record is None or not restore_nonfinite(record):
            self.num_damaged += 1
            return
        event = record.get("event")
        if event == "header":
            self.header = record
        elif event == "resume":
            self.header = {**self.header, **(record.get("header") or {})}
            self.resumed_at.append(record.get("step", 0))
        elif event == "eval":
            self.evals = [old for old in self.evals if old.get("step") != record.get("step")] + [record]
        elif event is None:
            # A resumed run writes its steps anew; what was there of them and after is history.
            while self.steps and self.steps[-1]["step"] >= record["step"]:
                self.steps.pop()
            self.steps.append(record)


def read_metrics(path: Path | str) -> Metrics:
    """The whole file as it is now.

    Raises:
        FileNotFoundError: no such file."""
    metrics = Metrics(path)
    metrics.poll()
    return metrics


def restore_nonfinite(record: dict[str, Any]) -> bool:
    """Put NaN and infinities named in "nonfinite" back into the record, in place; False where a name is not there."""
    for name, text in (record.pop("nonfinite", None) or {}).items():
        target: Any = record
        *parents, last = name.split(".")
        try:
            for parent in parents:
                target = target[int(parent)] if isinstance(target, list) else target[parent]
            target[int(last) if isinstance(target, list) else last] = float(text)
        except (KeyError, IndexError, ValueError, TypeError):
            return False
    return True
