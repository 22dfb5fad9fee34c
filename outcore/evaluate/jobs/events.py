"""What an evaluation is doing, as JSON lines in a file and to whoever listens: stage, documents, stalls, failure."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outcore.evaluate.asking import Progress

Event = dict[str, Any]
Listener = Callable[[Event], None]
TELL_EVERY_S = 1.0
STALL_S, FIRST_STALL_S = 60.0, 600.0
"""Silence after which a stall is told, at least: longer where a portion takes long, and before the first one's time is
known."""
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


class EventLog:
    """Events of an evaluation as lines of JSON. One writer; a drive that is full costs events, never the evaluation."""

    def __init__(self, path: Path, listener: Listener, num_tasks: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._number = len(read_events(path))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._listener = listener
        self.progress = {**IDLE, "num_tasks": num_tasks}
        self._documents: list[tuple[str, int]] = []
        self._left_of: dict[tuple[str, int], int] = {}
        self._lock = threading.RLock()
        self._told_s = self._moved_s = time.monotonic()
        self._longest_s = 0.0
        self._is_stalled = self._has_answers = False
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._look, name="evaluation's stalls", daemon=True)
        self._watch.start()

    def tell(self, event: str, **more: Any) -> None:
        """Write one event."""
        with self._lock:
            self._number += 1
            entry = {"n": self._number, "time": time.time(), "event": event, **more}
            try:
                self._file.write(json.dumps(entry) + "\n")
                self._file.flush()
            except (OSError, ValueError):
                pass
            self._listener(entry)  # in the order of the file

    def start_task(self, name: str, number: int) -> None:
        """A task's requests are built next."""
        self._moved()
        self.progress |= {"stage": "tasks", "task": name, "tasks_done": number}
        self.progress |= {"requests_done": 0, "requests": 0, "documents_done": 0, "documents": 0, "left_s": None}
        self.tell("stage", **self.progress)

    def start_requests(self, stage: str, documents: list[tuple[str, int]]) -> None:
        """Note that these requests are asked next; for each, the document that it belongs to."""
        self._moved()
        self._documents, self._left_of = documents, {}
        for document in documents:
            self._left_of[document] = self._left_of.get(document, 0) + 1
        self.progress |= {"stage": stage, "requests_done": 0, "requests": len(documents)}
        self.progress |= {"documents_done": 0, "documents": len(self._left_of)}
        self.tell("stage", **self.progress)

    def move(self, progress: Progress) -> None:
        """Answers came."""
        self._moved()
        self._has_answers = self._has_answers or progress.left_s is not None
        finished = 0
        for number in progress.newly:
            if number < len(self._documents):
                document = self._documents[number]
                self._left_of[document] -= 1
                finished += self._left_of[document] == 0
        begins = progress.stage not in ("resumed", self.progress["stage"])
        self.progress["documents_done"] += finished
        self.progress |= {"requests_done": progress.done, "requests": progress.total, "left_s": progress.left_s}
        if progress.stage != "resumed":
            self.progress["stage"] = progress.stage
        now_s = time.monotonic()
        if begins:
            self.tell("stage", **self.progress)
        elif now_s - self._told_s >= TELL_EVERY_S or progress.done == progress.total:
            self._told_s = now_s
            self.tell("progress", **self.progress)

    def close(self) -> None:
        """No event follows."""
        self._closing.set()
        self._watch.join()
        self._file.close()

    def _moved(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._longest_s = max(self._longest_s, min(now_s - self._moved_s, 10 * STALL_S))
            self._moved_s, self._is_stalled = now_s, False

    def _look(self) -> None:
        while not self._closing.wait(1.0):
            quiet_s = time.monotonic() - self._moved_s
            least_s = STALL_S if self._has_answers else FIRST_STALL_S
            if quiet_s > max(least_s, 3 * self._longest_s) and not self._is_stalled:
                self._is_stalled = True
                self.tell("stall", message=f"nothing came for {quiet_s:.0f} s", quiet_s=quiet_s, **self.progress)


def read_events(path: Path, after: int = 0) -> list[Event]:
    """Events with a number above `after`; a torn last line is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("n", 0) > after:
            found.append(event)
    return found


def progress_of(path: Path) -> dict[str, Any]:
    """Progress of an evaluation by its last event that says so."""
    for event in reversed(read_events(path)):
        if "stage" in event:
            return {name: event.get(name, value) for name, value in IDLE.items()}
    return dict(IDLE)
