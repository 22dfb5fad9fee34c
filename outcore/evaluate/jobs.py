"""One evaluation from start to end, on this machine's engine or a server's.

What an evaluation is doing: told to a listener as events, and kept beside the result for other processes.

A job: one suite on one model. It can be killed at any moment and gone on with; the scores are the same.

What is evaluated: an opened model, who it is, and how it is laid out on this machine."""

from __future__ import annotations

import platform
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from outcore import __version__
from outcore.common.errors import line_of
from outcore.common.files import read_object, write_json
from outcore.common.journal import is_held
from outcore.common.quantities import counted
from outcore.evaluate.asking import PORTION_TOKENS, AnswerJournal, Cancelled, Desk, EngineAnswerer, Progress
from outcore.evaluate.history import History
from outcore.evaluate.settings import EvaluationError, EvaluationSettings
from outcore.evaluate.tasks import harness_version
from outcore.infer.opening import OpenedModel, model_hash

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


@dataclass(frozen=True)
class Subject:
    """An opened model and what the history notes of it."""

    opened: OpenedModel
    name: str
    model_hash: str
    placement: tuple[str, ...]
    launch: dict[str, Any]
    versions: dict[str, str]
    answerer: EngineAnswerer
    portion_tokens: int
    """Tokens that are asked at once, unless told: a pass's worth; on a server less, so that others get their turn."""

    @property
    def answers_depend_on(self) -> dict[str, Any]:
        """Model and settings for which a journal's answers are valid."""
        keys = ("device", "precision", "adapter", "chunk_tokens", "context_tokens", "kv_format")
        return {"model": self.name, "model_hash": self.model_hash} | {key: self.launch[key] for key in keys}


SERVED_TOKENS = {"cuda": 1 << 14, "cpu": 1 << 11}


def subject_of(opened: OpenedModel, name: str, is_well: Callable[[], bool] | None = None) -> Subject:
    """A model that was opened here, or (with `is_well`) that a server runs."""
    found = opened.found
    kind = opened.device.type
    tokens = PORTION_TOKENS if is_well is None else SERVED_TOKENS
    return Subject(
        opened,
        name,
        model_hash(found.folders),
        tuple(opened.placement.lines()),
        launch_of(opened),
        {
            "outcore": __version__,
            "lm_eval": harness_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        EngineAnswerer(opened, is_well),
        tokens[kind],
    )


def launch_of(opened: OpenedModel) -> dict[str, Any]:
    """Describe the model's layout: ranks, ZeRO's terms for where weights live, and everything the answers depend on."""
    placement = opened.placement
    homes = {home.home for home in placement.parts}
    weights = "nvme" if "nvme" in homes else "cpu" if "ram" in homes and opened.device.type != "cpu" else "none"
    dtype = next(p.dtype for p in opened.found.loaded.model.parameters() if p.is_floating_point())
    return {
        "world_size": 1,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "zero": {
            "stage": 0 if weights == "none" else 3,
            "offload_param": weights,
            "num_buffers": placement.num_buffers,
        },
        "device": str(opened.device),
        "device_name": torch.cuda.get_device_name(opened.device) if opened.device.type == "cuda" else "",
        "precision": str(dtype).removeprefix("torch."),
        "preset": placement.preset.name,
        "kv_home": placement.kv_home,
        "kv_bytes": placement.kv_bytes,
        "kv_format": opened.engine.scheduler.cache.settings.kv_format,
        "context_tokens": placement.context_tokens,
        "chunk_tokens": placement.chunk_tokens,
        "pass_tokens": placement.pass_tokens,
        "max_sequences": placement.max_sequences,
        "adapter": ", ".join(opened.found.folders[1:]),
    }


JOURNAL, PROGRESS = "journal", "progress.json"
Record = dict[str, Any]


def unfinished_or_new(
    history: History, subject: Subject, settings: EvaluationSettings, *, resume: bool = True, host: str = "command"
) -> Record:
    """The record of an evaluation to be done: the newest of this model and these settings that was not finished and is
    not running, or a new one, saved as queued."""
    key = settings.key(subject.name, subject.model_hash, str(subject.launch["adapter"]), subject.launch["precision"])
    for record in history.unfinished(key) if resume else ():
        if not is_held(history.folder_of(record["id"]) / JOURNAL):
            return record
    record = {
        "id": f"eval-{uuid.uuid4().hex[:12]}",
        "object": "evaluation",
        "key": key,
        "status": "queued",
        "host": host,
        "model": subject.name,
        "model_hash": subject.model_hash,
        "tasks": list(settings.tasks),
        "settings": settings.as_json(),
        "launch": subject.launch,
        "placement": list(subject.placement),
        "versions": subject.versions,
        "created_at": time.time(),
        "started_at": None,
        "completed_at": None,
        "seconds": None,
        "asking_s": None,
        "error": None,
    }
    history.save(record)
    return record


class Job:
    """One evaluation from its tasks to its record. `run` once; `cancel` from any thread. `tasks`: what `load_tasks`
    gave, where it was called already."""

    def __init__(
        self,
        history: History,
        record: Record,
        subject: Subject,
        listener: Callable[[Event], None] = lambda event: None,
        tasks: Mapping[str, Any] | None = None,
    ) -> None:
        self._tasks = tasks
        self.history, self.record, self.subject = history, dict(record), subject
        self.settings = EvaluationSettings.from_fields(record["settings"])
        self.folder: Path = history.folder_of(record["id"])
        self.scores: list[Record] = []
        self.samples: list[Record] = []
        self._listener = listener
        self._cancelled, self._keeps_status = threading.Event(), False
        self.progress: JobProgress | None = None

    def cancel(self, *, keep: bool = False) -> None:
        """End the job before the next portion; what was answered stays, and it can be gone on with. `keep`: its status
        too, because whoever runs it goes on with it."""
        self._keeps_status = keep and not self._cancelled.is_set()
        self._cancelled.set()

    def run(self) -> Record:
        """The finished record. What goes wrong is told, noted in the record and raised."""
        settings, subject = self.settings, self.subject
        portion = settings.note_tokens or subject.portion_tokens
        journal = AnswerJournal(
            self.folder / JOURNAL, {**subject.answers_depend_on, "seed": settings.seed, "portion_tokens": portion}
        )
        self.progress = progress = JobProgress(self.folder / PROGRESS, self._listener, len(settings.tasks))
        began_s = time.monotonic()
        spent_s = self.record["seconds"] or 0.0
        try:
            self._save("running", started_at=self.record["started_at"] or time.time(), error=None)
            if journal.answers:
                progress.tell("resumed", message=f"{counted(len(journal.answers), 'question')} answered already")
            desk = Desk(subject.answerer, journal, portion, progress.move, self._check)
            self._run_suite(desk, progress)
            seconds = {"seconds": spent_s + time.monotonic() - began_s, "asking_s": desk.asking_s}
            self.record |= {"status": "completed", "completed_at": time.time(), **seconds}
            self.history.finish(self.record, self.scores, self.samples)
            progress.figures |= {"stage": "done", "tasks_done": len(settings.tasks), "left_s": 0.0}
            progress.tell("completed", **progress.figures)
            journal.remove()  # with which it is under way no more: who listens has heard the end
        except BaseException as error:
            self._end(error, spent_s + time.monotonic() - began_s)
            raise
        finally:
            journal.close()
        return self.record

    def _run_suite(self, desk: Desk, progress: JobProgress) -> None:
        from outcore.evaluate.harness import OutcoreLM, run_suite

        lm = OutcoreLM(
            desk=desk,
            opened=self.subject.opened,
            seed=self.settings.seed,
            starting=lambda stage, documents: progress.start_requests(stage, list(documents)),
        )

        def scored(name: str, scores: list[Record], samples: list[Record]) -> None:
            self.scores += scores
            self.samples += samples
            for score in scores:
                progress.tell("score", **score)

        run_suite(lm, self.settings, progress.start_task, scored, self._tasks)

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled

    def _end(self, error: BaseException, seconds: float) -> None:
        """Note how it ended; a history that cannot be written must not hide why."""
        assert self.progress is not None
        if self._keeps_status and isinstance(error, Cancelled):
            return
        is_cancelled = isinstance(error, (Cancelled, KeyboardInterrupt))
        status = "cancelled" if is_cancelled else "failed"
        words = (
            None if is_cancelled else str(error) if isinstance(error, (EvaluationError, ValueError)) else line_of(error)
        )
        try:
            self._save(status, seconds=seconds, error=words)
        except ValueError as second:
            self.progress.tell("stage", message=f"the history was not written: {second}", **self.progress.figures)
        self.progress.tell(status, message=words or "", **self.progress.figures)

    def _save(self, status: str, **more: Any) -> None:
        self.record |= {"status": status, **more}
        self.history.save(self.record)
