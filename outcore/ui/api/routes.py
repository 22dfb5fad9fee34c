"""All routes of the panels in one table, over the objects that do the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.requests import Request

from outcore import __version__
from outcore.evaluate.http import Evaluations
from outcore.serve.additions import ApiError, ClosedEvents, bad, read_body
from outcore.ui.api import form
from outcore.ui.api.conversations import Conversations
from outcore.ui.api.estimate import estimate
from outcore.ui.api.machine import MachineWatch
from outcore.ui.api.model import ModelHost
from outcore.ui.api.passing import PassOn
from outcore.ui.api.paths import check_path, folders_in
from outcore.ui.api.place import Place
from outcore.ui.api.preview import preview
from outcore.ui.api.runs import Runs
from outcore.ui.api.serving import ServingWatch
from outcore.ui.api.training import Training

MAX_BODY_BYTES = 4 << 20
Record = dict[str, Any]


class PanelsApi:
    """What the routes work with; `add_to` an application, `begin` and `end` with its server."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place or Place()
        self.training = Training(self.place)
        self.runs = Runs(self.place, self.training)
        self.host = ModelHost(self.place)
        self.conversations = Conversations(self.place, self.host)
        self.serving = ServingWatch(self.host)
        self.machine = MachineWatch(self.place, beside=self.serving.look)
        self.evaluations = Evaluations(lambda: None, self.place.logs / "evaluations.db")

    def begin(self) -> None:
        """The server has started."""
        self.machine.begin()

    async def end(self) -> None:
        """The server ends: the model with it; runs go on."""
        self.machine.end()
        await self.evaluations.end()
        await asyncio.to_thread(self.host.close)

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        _add_plain(app, self)
        _add_training(app, self)
        _add_runs(app, self)
        _add_model(app, self)
        _add_conversations(app, self.conversations)
        self.evaluations.add_to(app)
        app.add_middleware(PassOn, host=self.host)


async def _done(work: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """The result of work that may take a while, or touches a drive."""
    try:
        return await asyncio.to_thread(work, *args, **more)
    except OSError as error:
        words = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise ApiError(507 if error.errno in (28, 122) else 500, f"The drive says: {words}.", code="drive") from error


async def _body(http: Request) -> Record:
    return await read_body(http, MAX_BODY_BYTES) if int(http.headers.get("content-length") or 0) else {}


def _fields(body: Record) -> Record:
    fields = body.get("fields", {})
    if not isinstance(fields, dict):
        raise bad("fields must be an object: setting -> value.", "fields")
    return fields


def _add_plain(app: FastAPI, api: PanelsApi) -> None:
    @app.get("/health")
    async def health() -> Record:
        return {"status": "ok", "version": __version__}

    @app.get("/v1/fields")
    async def fields() -> Record:
        return form.table()

    @app.post("/v1/estimate")
    async def estimated(http: Request) -> Record:
        return await _done(estimate, _fields(await _body(http)))

    @app.post("/v1/data/preview")
    async def previewed(http: Request) -> Record:
        body = await _body(http)
        return await _done(preview, _fields(body), int(body.get("rows", 3)))

    @app.get("/v1/paths/check")
    async def checked(path: str, needed_gb: float = 0.0) -> Record:
        return await _done(check_path, path, needed_gb)

    @app.get("/v1/paths/folders")
    async def folders(path: str = "") -> Record:
        return await _done(folders_in, path)

    @app.get("/v1/machine")
    async def machine() -> Record:
        return await _done(api.machine.facts)

    @app.get("/v1/machine/live")
    async def live() -> Record:
        return await _done(api.machine.live)

    @app.get("/v1/machine/thresholds")
    async def thresholds() -> Record:
        return await _done(api.machine.thresholds)

    @app.put("/v1/machine/thresholds")
    async def set_thresholds(http: Request) -> Record:
        return await _done(api.machine.set_thresholds, await _body(http))


def _add_training(app: FastAPI, api: PanelsApi) -> None:
    @app.post("/v1/runs")
    async def start(http: Request) -> Record:
        return await _done(api.training.start, _fields(await _body(http)))

    @app.post("/v1/runs/{name}/stop")
    async def stop(name: str, http: Request) -> Record:
        at_once = (await _body(http)).get("at_once") is True
        return await _done(api.training.stop, name, at_once=at_once)

    @app.post("/v1/runs/{name}/resume")
    async def resume(name: str, http: Request) -> Record:
        return await _done(api.training.resume, name, _fields(await _body(http)))

    @app.get("/v1/runs/{name}/settings")
    async def settings(name: str) -> Record:
        found = await _done(api.training.settings_of, name)
        return {"fields": found, "command": form.command_of(found), "yaml": form.yaml_of(found)}


def _add_runs(app: FastAPI, api: PanelsApi) -> None:
    @app.get("/v1/runs")
    async def list_all() -> Record:
        return {"object": "list", "data": await _done(api.runs.all)}

    @app.get("/v1/run_comparison")
    async def compare(names: str) -> Record:
        found = [name for name in names.split(",") if name]
        if len(found) < 2:
            raise bad("names must be at least two runs, with a comma between them.", "names")
        return await _done(api.runs.compare, found)

    @app.get("/v1/runs/{name}")
    async def look(name: str) -> Record:
        return await _done(api.runs.get, name)

    @app.get("/v1/runs/{name}/series")
    async def series(name: str, points: int = 400) -> Record:
        return await _done(api.runs.series, name, points)

    @app.get("/v1/runs/{name}/log")
    async def log(name: str) -> Record:
        return await _done(api.runs.log, name)

    @app.post("/v1/runs/{name}/export")
    async def export(name: str, http: Request) -> Record:
        return await _done(api.runs.export, name, merge=(await _body(http)).get("merge") is True)

    @app.delete("/v1/runs/{name}")
    async def delete(name: str) -> Record:
        return await _done(api.runs.delete, name)


def _add_model(app: FastAPI, api: PanelsApi) -> None:
    @app.get("/v1/model")
    async def state() -> Record:
        return await _done(api.host.state)

    @app.post("/v1/model")
    async def load(http: Request) -> Record:
        return await _done(api.host.load, await _body(http))

    @app.delete("/v1/model")
    async def unload() -> Record:
        return await _done(api.host.unload)

    @app.get("/v1/model/live")
    async def live() -> Record:
        return await _done(api.serving.live)

    @app.get("/v1/model/metrics")
    async def metrics() -> Record:
        return await _done(api.host.metrics)


def _add_conversations(app: FastAPI, conversations: Conversations) -> None:
    @app.get("/v1/conversations")
    async def list_all() -> Record:
        return {"object": "list", "data": await _done(conversations.all)}

    @app.post("/v1/conversations")
    async def create(http: Request) -> Record:
        return await _done(conversations.create, await _body(http))

    @app.get("/v1/conversations/{name}")
    async def look(name: str) -> Record:
        return await _done(conversations.get, name)

    @app.patch("/v1/conversations/{name}")
    async def change(name: str, http: Request) -> Record:
        return await _done(conversations.change, name, await _body(http))

    @app.delete("/v1/conversations/{name}")
    async def remove(name: str) -> Record:
        return await _done(conversations.remove, name)

    @app.get("/v1/conversations/{name}/export")
    async def export(name: str, format: str = "json") -> Response:
        text, media = await _done(conversations.export, name, format)
        headers = {"Content-Disposition": f'attachment; filename="{name}.{format}"'}
        return Response(text, media_type=media, headers=headers)

    @app.post("/v1/conversations/{name}/answer")
    async def answer(name: str, http: Request) -> Response:
        one = await _done(conversations.prepare, name, await _body(http))

        async def told():
            async with aclosing(conversations.answer(one)) as events:
                async for event in events:
                    yield event

        return ClosedEvents(told(), sep="\n")
