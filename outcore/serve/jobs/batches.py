"""Batch jobs over HTTP, in OpenAI's shape: created from a file of requests, answered in the background, fetched by id.

A job's results go to a journal as they come, so a server that was killed goes on with its jobs when it starts again.
A line whose answer failed is asked again; where the engine fails for good, the job waits for the next start.
Jobs share passes with everyone else's requests and take at most half of the answers written at once."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from outcore.common import write_json
from outcore.common.errors import line_of
from outcore.common.files import json_of, read_object
from outcore.common.journal import is_held
from outcore.infer import Answer, Request
from outcore.infer.commands import Journal, Line, batch_body, body_of, failure_of, numbered, read_line, result_of
from outcore.serve.body import metadata_of
from outcore.serve.errors import ApiError, bad
from outcore.serve.jobs.files import Files
from outcore.serve.plain import EmbeddingCall, embedded
from outcore.serve.service import Service

logger = logging.getLogger(__name__)
EMBEDDINGS = "/v1/embeddings"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", EMBEDDINGS)
WINDOW = "24h"
RUNNING = ("validating", "in_progress", "finalizing")
MAX_TRIES = 3
"""Times that a line is asked whose answer fails, though passes go on."""
NEEDED = {"id": str, "status": str, "created_at": int, "input_file_id": str, "request_counts": dict}
"""Fields that a job's description holds at least, with their types."""
_ID = re.compile(r"^batch-[0-9a-f]{32}$")


class EngineFailed(Exception):
    """No pass runs any more."""


class Batches:
    """Batch jobs of a server. Lives on the server's event loop."""

    def __init__(self, service: Service, files: Files, folder: Path) -> None:
        self.service, self.files, self.folder = service, files, folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # what clients sent is theirs and ours
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending = asyncio.Lock()
        self._room = asyncio.Semaphore(max(1, service.opened.placement.max_sequences // 2))

    def go_on(self) -> None:
        """Go on with jobs that a server of this model before this one left unfinished, and that no other works on."""
        jobs = self.all()
        for path in set(self.folder.glob("batch-*.json")) - {self._path(batch, "json") for batch in jobs}:
            logger.warning("%s describes no job that can be read, and is left alone", path)
        for batch in jobs:
            is_ours = batch.get("model", self.service.name) == self.service.name
            journal = self._path(batch, "jsonl.journal")
            if batch["status"] in RUNNING and is_ours and not is_held(journal):
                self._start(batch)
            elif batch["status"] in ("completed", "cancelled") and not is_held(journal):
                journal.unlink(missing_ok=True)  # of a server that was killed when all but this was done

    async def stop(self) -> None:
        """End work on all jobs; they go on with the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Begin a job. ApiError for what cannot be."""
        endpoint, metadata, window = body.get("endpoint"), metadata_of(body), body.get("completion_window")
        if endpoint not in ENDPOINTS:
            raise bad(f"endpoint must be one of {', '.join(ENDPOINTS)}.", "endpoint")
        if not isinstance(body.get("input_file_id"), str):
            raise bad("input_file_id must be the id of a file.", "input_file_id")
        if window not in (None, "", WINDOW):
            raise bad(f"completion_window must be {WINDOW}.", "completion_window")
        source = self.files.path(body["input_file_id"])
        total = len(await asyncio.to_thread(list, numbered(source)))
        if not total:
            raise bad("The file has no lines.", "input_file_id")
        batch = {
            "id": f"batch-{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "model": self.service.name,
            "errors": None,
            "input_file_id": body["input_file_id"],
            "completion_window": WINDOW,
            "status": "in_progress",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(time.time()),
            "in_progress_at": int(time.time()),
            "completed_at": None,
            "cancelled_at": None,
            "failed_at": None,
            "request_counts": {"total": total, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        self._save(batch)
        self._start(batch)
        return batch

    def get(self, name: str) -> dict[str, Any]:
        """A job as it is now; 404 when there is none."""
        found = read_object(self.folder / f"{name}.json") if _ID.match(name) else {}
        if not all(isinstance(found.get(field), kind) for field, kind in NEEDED.items()):
            raise ApiError(404, f"There is no batch {name!r}.", param="batch_id")
        return found

    def all(self) -> list[dict[str, Any]]:
        """Newest first; what cannot be read is left out, and alone."""
        found = []
        for path in self.folder.glob("batch-*.json"):
            with suppress(ApiError):
                found.append(self.get(path.stem))
        return sorted(found, key=lambda batch: (-batch["created_at"], batch["id"]))

    async def cancel(self, name: str) -> dict[str, Any]:
        """End a job; what was answered can be fetched."""
        batch = self.get(name)
        if batch["status"] not in RUNNING:
            raise ApiError(409, f"The batch is {batch['status']} already.", param="batch_id")
        if (task := self._tasks.get(name)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with self._ending:  # two may cancel: the first to go on does the rest
            batch = self.get(name)
            if batch["status"] in RUNNING:
                try:
                    journal = self._journal(batch)
                except ValueError as error:
                    raise ApiError(409, str(error), param="batch_id") from error
                await self.service.reading.run(self._end_early, batch, journal)
        return self.get(name)

    def _end_early(self, batch: dict[str, Any], journal: Journal) -> None:
        """Note of every line that has no answer that it was cancelled, and write the files."""
        for number, text in numbered(self.files.path(batch["input_file_id"])):
            if number not in journal.done:
                line = self._line(batch, number, text)
                journal.add(number, self._result(Line(number, line.shape, line.name, None, "cancelled"), []))
        self._finish(batch, journal, batch["request_counts"]["total"], "cancelled")

    def check_free(self, file: str) -> None:
        """409 for a file that a job reads."""
        for batch in self.all():
            if batch["input_file_id"] == file and batch["status"] in RUNNING:
                raise ApiError(409, f"{batch['id']} reads this file: cancel it, or wait for its end.", param="file_id")

    # --- one job

    def _start(self, batch: dict[str, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._tasks[batch["id"]] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch["id"], None))

    async def _run(self, batch: dict[str, Any]) -> None:
        try:
            journal = self._journal(batch)
        except (ValueError, OSError) as error:
            self._fail(batch, str(error))
            return
        counts = batch["request_counts"]
        counts["failed"] = len(journal.failed)
        counts["completed"] = len(journal.done) - counts["failed"]

        async def one(number: int, text: str) -> None:
            result = await self._answered(batch, number, text)
            journal.add(number, result)
            counts["failed" if result["error"] else "completed"] += 1
            self._save(batch)

        try:
            async with asyncio.TaskGroup() as group:
                lines = numbered(self.files.path(batch["input_file_id"]))
                for number, text in await asyncio.to_thread(list, lines):
                    if number not in journal.done:
                        await self._room.acquire()
                        task = group.create_task(one(number, text))
                        task.add_done_callback(lambda _: self._room.release())  # also of one that never began
            self._finish(batch, journal, counts["total"], "completed")
        except asyncio.CancelledError:
            journal.close()
            raise
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, EngineFailed):
                journal.close()
                logger.error("%s waits for the next start: no pass runs any more", batch["id"])
                return
            journal.close()
            logger.error("%s failed", batch["id"], exc_info=error)
            self._fail(batch, f"the server failed: {line_of(error)}")

    async def _answered(self, batch: dict[str, Any], number: int, text: str) -> dict[str, Any]:
        if batch["endpoint"] == EMBEDDINGS:
            return await self._embedded(number, text)
        line = await self.service.reading.run(self._line, batch, number, text)
        if line.request is None:
            return self._result(line, [])
        try:
            self.service.check_length(line.request)
            answers = await self._asked(line.request)
        except (ValueError, ApiError) as error:
            return self._result(Line(number, line.shape, line.name, None, str(error)), [])
        return self._result(line, answers)

    async def _embedded(self, number: int, text: str) -> dict[str, Any]:
        line = Line(number, "batch", None, None)
        try:
            entry = json_of(text)
            if not isinstance(entry, dict):
                raise ValueError("a line must be a JSON object")
            line = Line(number, "batch", entry.get("custom_id"), None)
            _, body = batch_body(entry, {EMBEDDINGS: "input"})
            call = await self.service.reading.run(EmbeddingCall, self.service, body)
            if call.ignored:
                raise ValueError(f"unknown field {call.ignored[0]!r}")
        except (ValueError, TypeError, ApiError) as error:
            return failure_of(line, str(error))
        why = ""
        for _ in range(MAX_TRIES):
            try:
                return body_of(number, line.name, await embedded(call))
            except Exception as error:  # whatever a pass ended with
                why = line_of(error)
                await self._check_engine()
        return failure_of(line, why, 500, "server_error")

    async def _asked(self, request: Request) -> list[Answer]:
        answers: list[Answer] = []
        for _ in range(MAX_TRIES):
            async with aclosing(self.service.stream(request, "/v1/batches")) as items:
                answers = [item async for item in items if isinstance(item, Answer)]
            if all(answer.finish != "error" for answer in answers):
                break
            await self._check_engine()
        return answers

    async def _check_engine(self) -> None:
        """EngineFailed where asking again would be in vain."""
        await self.service.thread.settled()
        if self.service.is_stopping or not self.service.thread.is_well:
            raise EngineFailed

    def _line(self, batch: dict[str, Any], number: int, text: str) -> Line:
        service = self.service
        name = f"{batch['id']}-{number}"
        line = read_line(number, text, service.prompts, service.grammars, service.defaults_for, name, self._check)
        if line.request is not None and line.shape != batch["endpoint"]:
            return Line(number, "batch", line.name, None, f"the batch is for {batch['endpoint']}, the line is not")
        return line if line.shape != "plain" else Line(number, "batch", line.name, None, line.error or "has no body")

    def _check(self, body: Mapping[str, Any]) -> None:
        try:
            self.service.check_model(body)
        except ApiError as error:
            raise ValueError(str(error)) from error

    def _result(self, line: Line, answers: list[Answer]) -> dict[str, Any]:
        return result_of(line, answers, self.service.prompts.tokenizer, self.service.name, self.service.started_s)

    def _journal(self, batch: dict[str, Any]) -> Journal:
        return Journal(self._path(batch, "jsonl"), {"batch": batch["id"], "model": self.service.name})

    def _finish(self, batch: dict[str, Any], journal: Journal, total: int, status: str) -> None:
        """Write the files and note them, then drop the journal: after a kill in between both are done again, under the
        same ids."""
        lines = list(journal.results(total))
        for kind, is_failed in (("output", False), ("error", True)):
            some = [line for number, line in enumerate(lines) if (number in journal.failed) is is_failed]
            if some:
                name = f"{batch['id']}_{kind}.jsonl"
                file = self.files.add(b"".join(some), name, "batch_output", uuid.uuid5(uuid.NAMESPACE_OID, name))
                batch = batch | {f"{kind}_file_id": file.id}
        stamp = "completed_at" if status == "completed" else "cancelled_at"
        self._save(batch | {"status": status, stamp: int(time.time())})
        journal.drop()

    def _fail(self, batch: dict[str, Any], why: str) -> None:
        errors = {"object": "list", "data": [{"code": "failed", "message": why, "line": None, "param": None}]}
        self._save(batch | {"status": "failed", "failed_at": int(time.time()), "errors": errors})

    def _save(self, batch: dict[str, Any]) -> None:
        write_json(self._path(batch, "json"), batch)

    def _path(self, batch: dict[str, Any], ending: str) -> Path:
        return self.folder / f"{batch['id']}.{ending}"
