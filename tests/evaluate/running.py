"""Evaluations as a user starts them, and results made by hand."""

import json
from pathlib import Path
from typing import Any

from outcore import cli

SMALL = ("--context", "256", "--ram_gib", "1", "--device", "cpu", "--precision", "fp32")


class Evaluation:
    """`outcore evaluate` and `evaluations` in this process."""

    def __init__(self, model: Path, folder: Path, capsys: Any) -> None:
        self.model, self.folder, self._capsys = model, folder, capsys
        self.said = ""
        """What the last call said on stderr."""

    def argv(self, tasks: str, *more: str, limit: int = 4) -> list[str]:
        return [
            "evaluate", str(self.model), "--tasks", tasks, "--limit", str(limit), *SMALL,
            "--history", str(self.folder), *more,
        ]  # fmt: skip

    def call(self, argv: list[str], code: int = 0) -> str:
        """stdout of a call that ends with this code."""
        self._capsys.readouterr()
        found = cli.main(argv)
        said = self._capsys.readouterr()
        self.said = said.err
        assert found == code, said.err
        return said.out

    def run(self, tasks: str, *more: str, limit: int = 4) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The record and all events of an evaluation that completes."""
        lines = self.call(self.argv(tasks, "--json", *more, limit=limit)).splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return found[-1], found[:-1]

    def history(self, *argv: str, code: int = 0) -> str:
        """stdout of `outcore evaluations`."""
        return self.call(["evaluations", *argv, "--history", str(self.folder)], code)


def record_of(name: str, **more: Any) -> dict[str, Any]:
    """A record as a job makes it."""
    return {
        "id": name, "object": "evaluation", "key": "k", "status": "running", "host": "command", "model": "m",
        "model_hash": "h", "tasks": ["t"], "settings": {"limit": 4, "seed": 1},
        "launch": {"world_size": 1, "tensor_parallel": 1, "pipeline_parallel": 1, "device": "cpu", "preset": name[-1]},
        "placement": ["weights in RAM"], "versions": {"lm_eval": "0.4.13"}, "created_at": 1.7e9, "started_at": 1.7e9,
        "completed_at": None, "seconds": 2.0, "asking_s": 1.0, "error": None, **more,
    }  # fmt: skip


def result_of(values: tuple[float, ...]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(scores, documents) of a task whose documents were right (1) or wrong (0)."""
    scores = [
        {
            "task": "t", "version": "1", "metric": "acc", "filter": "none", "value": sum(values) / len(values),
            "stderr": 0.1, "documents": len(values), "higher_is_better": True,
        }
    ]  # fmt: skip
    documents = [
        {
            "task": "t", "filter": "none", "doc_id": number, "prompt": f"Frage {number} ü", "continuations": ["a", "b"],
            "target": "0", "answers": [[-1.0 - value, True], [-2.0, False]], "filtered": ["a"],
            "metrics": {"acc": value},
        }
        for number, value in enumerate(values)
    ]  # fmt: skip
    return scores, documents
