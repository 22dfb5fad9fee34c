"""Evaluations over HTTP: created, watched, cancelled and compared by id. Needs the server's packages.

Jobs run one after the other on a thread of their own, over the model that is loaded, and share its passes with everyone
else's requests. One that a server left unfinished goes on with its next start."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.requests import Request as HttpRequest

from outcore.common.journal import is_held
from outcore.evaluate.asking import Cancelled
from outcore.evaluate.history import History, HistoryError, as_csv, diff_of
from outcore.evaluate.jobs import (
    IDLE,
    JOURNAL,
    PROGRESS,
    Job,
    Subject,
    launch_of,
    progress_of,
    subject_of,
    unfinished_or_new,
)
from outcore.evaluate.settings import EvaluationError, EvaluationSettings
from outcore.evaluate.tasks import TaskNames, check_harness
from outcore.infer.opening import model_hash
from outcore.serve.additions import ApiError, Service, bad, check_folder, read_body

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 1 << 20
UNFINISHED = ("queued", "running")
Record = dict[str, Any]


class Evaluations:
    """Evaluations over HTTP. `service_of` gives the service that is loaded now, or None."""

    def __init__(self, service_of: Callable[[], Service | None], history: Path) -> None:
        self.history = History(history)
        self.names = TaskNames(self.history.folder / "task_names.json")
        self._service_of = service_of
        self._worker = ThreadPoolExecutor(1, "evaluation")
        self._jobs: dict[str, tuple[Job, Future[None]]] = {}
        self._lock = threading.RLock()  # one at a time looks what is under way, and begins or ends something

    # --- the server's

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        add_evaluations(app, self)

    def begin(self) -> None:
        """Go on with what a server before this one left unfinished, where it is of the model that is loaded."""
        try:
            for record in self.history.all():
                if record["status"] in UNFINISHED and record.get("host") == "server":
                    with suppress(ApiError):  # of another model, or of a folder that is allowed no more
                        self._go_on(record)
        except HistoryError as error:
            logger.warning("evaluations are not gone on with: %s", error)

    async def end(self) -> None:
        """End work on all jobs; they go on with the next start."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        for job, _ in list(self._jobs.values()):
            job.cancel(keep=True)
        await asyncio.to_thread(self._worker.shutdown, True)

    # --- what routes do

    def create(self, body: Record) -> Record:
        """Begin an evaluation, or go on with an unfinished one of equal model and settings. ApiError."""
        fields = {name: value for name, value in body.items() if name not in ("resume", "model")}
        try:
            check_harness()
        except EvaluationError as error:
            raise ApiError(503, str(error), code="not_installed") from error
        try:
            settings = EvaluationSettings.from_fields(fields)
        except EvaluationError as error:
            raise bad(str(error), error.param) from error
        subject = self._subject(body.get("model"))
        self._check_reach(settings.include_path)  # before anything is kept: a later start goes on with what is
        self.history.check_writable()
        with self._lock:
            record = unfinished_or_new(
                self.history, subject, settings, resume=body.get("resume") is not False, host="server"
            )
            return self._start(record, subject)

    def launch(self) -> Record:
        """Describe the layout of the loaded model, which every evaluation of it keeps. ApiError without a model."""
        opened = self._loaded().opened
        return {
            "model_hash": model_hash(opened.found.folders),
            "placement": opened.placement.lines(),
            **launch_of(opened),
        }

    def resume(self, name: str) -> Record:
        """Go on with an evaluation that was not finished."""
        with self._lock:
            record = self.get(name)
            if record["status"] == "completed":
                raise ApiError(409, "The evaluation is completed already.", param="id")
            if record["status"] in UNFINISHED:
                raise ApiError(409, "The evaluation runs already.", param="id")
            return self._go_on(self._found(name))

    def get(self, name: str) -> Record:
        """An evaluation as it is now."""
        return self._shown(self._found(name))

    def all(self) -> list[Record]:
        """Newest first."""
        return [self._shown(record) for record in self.history.all()]

    def cancel(self, name: str) -> Record:
        """End a job; what was answered stays."""
        with self._lock:
            record = self.get(name)
            entry = self._jobs.get(record["id"])
            if entry is None:
                raise ApiError(409, f"The evaluation is {record['status']}, not under way here.", param="id")
            job, future = entry
            job.cancel()
            if future.cancel():
                self.history.save(job.record | {"status": "cancelled"})
                self._jobs.pop(record["id"], None)
            return self.get(name)

    def remove(self, name: str) -> Record:
        """Forget an evaluation."""
        with self._lock:
            record = self.get(name)
            if record["status"] in UNFINISHED:
                raise ApiError(409, "The evaluation is under way: cancel it first.", param="id")
            self.history.remove(record["id"])
        return {"id": record["id"], "object": "evaluation", "deleted": True}

    def diff(self, a: str, b: str) -> Record:
        """Two evaluations side by side."""
        first, second = self._found(a), self._found(b)
        return diff_of(self.history, first, second)

    def samples(self, name: str, task: str | None = None, offset: int = 0, limit: int = 50) -> Record:
        """Some documents of an evaluation."""
        if offset < 0 or not 0 < limit <= 1000:
            raise bad("offset must be at least 0, limit from 1 to 1000.", "limit")
        found = self._found(name)["id"]
        data = self.history.samples(found, task, offset, limit)
        return {"object": "list", "data": data, "total": len(self.history.samples(found, task))}

    def export(self, name: str, format: str = "json") -> Response:
        """An evaluation as a file to keep."""
        record = self._found(name)
        if format not in ("json", "csv"):
            raise bad("format must be json or csv.", "format")
        if format == "csv":
            text, media = as_csv([record]), "text/csv"
        else:
            samples = self.history.samples(record["id"])
            text, media = json.dumps(record | {"samples": samples}, indent=1), "application/json"
        headers = {"Content-Disposition": f'attachment; filename="{record["id"]}.{format}"'}
        return Response(text, media_type=media, headers=headers)

    # --- parts

    def _shown(self, record: Record) -> Record:
        """A record with where it is now. One that is under way no more is read again: it was noted how it ended."""
        entry, folder = self._jobs.get(record["id"]), self.history.folder_of(record["id"])
        is_under_way = entry is not None or is_held(folder / JOURNAL)
        found = dict(record)
        if record["status"] in UNFINISHED and not is_under_way:
            with suppress(KeyError):  # removed
                found = self.history.get(record["id"])
        if entry is not None and entry[0].progress is not None:
            found["progress"] = dict(entry[0].progress.figures)
        else:
            found["progress"] = progress_of(folder / PROGRESS) if found["status"] != "queued" else dict(IDLE)
        if found["status"] in UNFINISHED and entry is None:
            found["status"] = "running" if is_under_way else "interrupted"
        elif entry is not None and found["status"] not in UNFINISHED:
            found["status"] = "running"  # until it can be cancelled no more, and gone on with
        for stamp in ("created_at", "started_at", "completed_at"):
            found[stamp] = None if found[stamp] is None else int(found[stamp])
        found.setdefault("scores", [])
        return found

    def _found(self, name: str) -> Record:
        try:
            return self.history.get(name)
        except KeyError:
            raise ApiError(404, f"There is no evaluation {name!r}.", param="id") from None

    def _loaded(self) -> Service:
        service = self._service_of()
        if service is None:
            raise ApiError(409, "No model is loaded: load one first.", code="no_model")
        return service

    def _subject(self, model: Any = None) -> Subject:
        service = self._loaded()
        if model is not None:
            service.check_model({"model": model})
        return subject_of(service.opened, service.name, lambda: service.thread.is_well)

    def _go_on(self, record: Record) -> Record:
        subject = self._subject()
        if (record["model"], record["model_hash"]) != (subject.name, subject.model_hash):
            raise ApiError(
                409, f"The evaluation is of {record['model']!r}; {subject.name!r} is loaded.", code="other_model"
            )
        return self._start({k: v for k, v in record.items() if k != "scores"}, subject)

    def _start(self, record: Record, subject: Subject) -> Record:
        self._check_reach(record["settings"].get("include_path"))
        with self._lock:
            if record["id"] not in self._jobs:
                record = record | {"status": "queued", "error": None, "created_at": record["created_at"] or time.time()}
                self.history.save(record)
                job = Job(self.history, record, subject)
                self._jobs[record["id"]] = (job, self._worker.submit(self._run, job))
            return self.get(record["id"])

    def _check_reach(self, folder: str | None) -> None:
        """ApiError for a folder of tasks, which may bring Python, that the command line did not allow."""
        if folder is not None:
            check_folder(folder, self._loaded().settings.allowed_folders, "include_path")

    def _run(self, job: Job) -> None:
        try:
            job.run()
        except Cancelled:
            pass
        except EvaluationError as error:
            logger.warning("%s failed: %s", job.record["id"], error)
        except Exception:
            logger.exception("%s failed", job.record["id"])
        finally:
            with self._lock:  # not before it is among them
                self._jobs.pop(job.record["id"], None)


def with_evaluations(service: Service) -> list[Evaluations]:
    """Evaluations of the model that this service has loaded; their history lies beside the server's records."""
    return [Evaluations(lambda: service, service.settings.logs.parent / "evaluations")]


def _told(work: Callable[..., Any]) -> Callable[..., Any]:
    """`work` as a route on a thread: path and query give its parameters, its errors become ApiErrors."""

    @wraps(work)
    def told(*args: Any, **more: Any) -> Any:
        try:
            return work(*args, **more)
        except HistoryError as error:
            raise ApiError(500, str(error), code="history") from error
        except EvaluationError as error:
            raise bad(str(error), error.param) from error

    return told


def add_evaluations(app: FastAPI, evaluations: Evaluations) -> None:
    """The endpoints /v1/evaluations and /v1/evaluation_tasks."""

    def list_all() -> Record:
        return {"object": "list", "data": evaluations.all(), "has_more": False}

    one = "/v1/evaluations/{name}"
    got: dict[str, Callable[..., Any]] = {
        "/v1/launch": evaluations.launch,
        "/v1/evaluations": list_all,
        one: evaluations.get,
        f"{one}/samples": evaluations.samples,
        f"{one}/export": evaluations.export,
        "/v1/evaluations/{a}/diff/{b}": evaluations.diff,
    }
    for path, work in got.items():
        app.get(path)(_told(work))
    app.delete(one)(_told(evaluations.remove))
    app.post(f"{one}/cancel")(_told(evaluations.cancel))
    app.post(f"{one}/resume")(_told(evaluations.resume))

    @app.get("/v1/evaluation_tasks")
    async def tasks(query: str = "", limit: int = 100) -> Record:
        is_complete = evaluations.names.is_complete  # asked before: all that make it so are found then
        found = [asdict(one) for one in evaluations.names.find(query, limit)]
        return {"object": "list", "data": found, "is_complete": is_complete}

    @app.post("/v1/evaluations")
    async def create(http: HttpRequest) -> Record:
        return await asyncio.to_thread(_told(evaluations.create), await read_body(http, MAX_BODY_BYTES))
