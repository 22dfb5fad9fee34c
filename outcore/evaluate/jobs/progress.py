"""What an evaluation is doing: told to a listener as events, and kept beside the result for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from outcore.common.files import read_object, write_json
from outcore.evaluate.asking import Progress

Event = dict[str, Any]
Listener = Callable[[Event], None]
TELL_EVERY_S = 1.0
IDLE: dict[str, Any] = {
    "stage": "queued",
    "task": "",
    "tasks_done": 0,
    "num_tasks": 0,
    "requests_done": 0,
    "requests": 0,
    "documents_done": 0,
    "documents": 0,
    "left_s": None,
}


class JobProgress:
    """Figures of one evaluation. A drive that is full costs the file, never the evaluation."""

    def __init__(self, path: Path, listener: Listener, num_tasks: int) -> None:
        self._path, self._listener = path, listener
        self.figures = {**IDLE, "num_tasks": num_tasks}
        self._documents: list[tuple[str, int]] = []
        self._left_of: dict[tuple[str, int], int] = {}
        self._told_s = time.monotonic()

    def tell(self, event: str, **more: Any) -> None:
        """Tell one event; the figures are kept as they are now."""
        with suppress(OSError):
            write_json(self._path, self.figures)
        self._listener({"time": time.time(), "event": event, **more})

    def start_task(self, name: str, number: int) -> None:
        """Note that a task's requests are built next."""
        self.figures |= {**IDLE, "num_tasks": self.figures["num_tasks"], "stage": "tasks", "task": name}
        self.figures["tasks_done"] = number
        self.tell("stage", **self.figures)

    def start_requests(self, stage: str, documents: list[tuple[str, int]]) -> None:
        """Note that these requests are asked next; for each, the document that it belongs to."""
        self._documents, self._left_of = documents, {}
        for document in documents:
            self._left_of[document] = self._left_of.get(document, 0) + 1
        self.figures |= {"stage": stage, "requests_done": 0, "requests": len(documents)}
        self.figures |= {"documents_done": 0, "documents": len(self._left_of)}
        self.tell("stage", **self.figures)

    def move(self, progress: Progress) -> None:
        """Count answers that came; a new stage is told at once, more of the same each second."""
        finished = 0
        for number in progress.newly:
            if number < len(self._documents):
                document = self._documents[number]
                self._left_of[document] -= 1
                finished += self._left_of[document] == 0
        begins = progress.stage not in ("resumed", self.figures["stage"])
        self.figures["documents_done"] += finished
        self.figures |= {"requests_done": progress.done, "requests": progress.total, "left_s": progress.left_s}
        if progress.stage != "resumed":
            self.figures["stage"] = progress.stage
        now_s = time.monotonic()
        if begins:
            self.tell("stage", **self.figures)
        elif now_s - self._told_s >= TELL_EVERY_S or progress.done == progress.total:
            self._told_s = now_s
            self.tell("progress", **self.figures)


def progress_of(path: Path) -> dict[str, Any]:
    """Figures of an evaluation, as whoever runs it kept them last."""
    return IDLE | read_object(path)
