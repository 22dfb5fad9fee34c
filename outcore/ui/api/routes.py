"""All routes of the panels in one table, over the objects that do the work."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.requests import Request

from outcore import __version__
from outcore.evaluate.http import Evaluations
from outcore.serve.additions import ApiError, ClosedEvents, bad, read_body
from outcore.ui.api import form
from outcore.ui.api.conversations import Conversations, Running
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
DRIVE_STATUS = {errno.ENOSPC: 507, errno.EDQUOT: 507, errno.ENAMETOOLONG: 400}
"""Statuses of what a drive refuses; of the rest 500."""
Record = dict[str, Any]


class PanelsApi:
    """Objects that the panels' routes work with; `add_to` an application, `begin` and `end` with its server."""

    def __init__(self, place: Place | None = None, allowed: Sequence[Path] = ()) -> None:
        self.place, self.allowed = place or Place(), tuple(allowed)
        self.training = Training(self.place)
        self.runs = Runs(self.place, self.training)
        self.host = ModelHost(self.place, self.allowed)
        self.conversations = Conversations(self.place, self.host)
        self.serving = ServingWatch(self.host)
        self.machine = MachineWatch(self.place, beside=self.serving.look)
        self.evaluations = Evaluations(lambda: None, self.place.logs / "evaluations")

    def fields(self, body: Record) -> Record:
        """Settings of a run that a client may say. ApiError."""
        fields = body.get("fields", {})
        if not isinstance(fields, dict):
            raise bad("fields must be an object: setting -> value.", "fields")
        settings = form.said(fields)
        form.check_reach(settings, self.allowed)
        return settings

    def begin(self) -> None:
        """The server has started."""
        self.machine.begin()

    async def tell_clients(self) -> None:
        """The server is about to end: so does the model, whose server tells who waits for an answer."""
        await asyncio.to_thread(self.host.close)

    async def end(self) -> None:
        """The server ends: the model with it; runs go on."""
        self.machine.end()
        await self.evaluations.end()
        await asyncio.to_thread(self.host.close)

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        _add_plain(app, self)
        _add_with_body(app, self)
        _add_conversations(app, self.conversations)
        self.evaluations.add_to(app)
        app.add_middleware(PassOn, host=self.host)


def _told(work: Callable[..., Any]) -> Callable[..., Any]:
    """Work that may take a while or touches a drive, as a route on a thread: path and query give its parameters."""

    @wraps(work)
    def told(*args: Any, **more: Any) -> Any:
        try:
            return work(*args, **more)
        except OSError as error:
            words = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            status = DRIVE_STATUS.get(error.errno or 0, 500)
            raise ApiError(status, f"The drive says: {words}.", code="drive") from error

    return told


async def _body(http: Request) -> Record:
    return await read_body(http, MAX_BODY_BYTES, may_lack=True)


def _add_plain(app: FastAPI, api: PanelsApi) -> None:
    """Routes that take no body."""

    def health() -> Record:
        return {"status": "ok", "version": __version__}

    def list_runs() -> Record:
        return {"object": "list", "data": api.runs.all()}

    def compare(names: str) -> Record:
        found = [name for name in names.split(",") if name]
        if len(found) < 2:
            raise bad("names must be at least two runs, with a comma between them.", "names")
        return api.runs.compare(found)

    def settings(name: str) -> Record:
        found = api.training.settings_of(name)
        return {"fields": found, "command": form.command_of(found), "yaml": form.yaml_of(found)}

    def folders(path: str = "") -> Record:
        return folders_in(path, api.allowed)

    def list_conversations(search: str = "") -> Record:
        return {"object": "list", "data": api.conversations.all(search)}

    got: dict[str, Callable[..., Any]] = {
        "/health": health,
        "/v1/fields": form.table,
        "/v1/paths/folders": folders,
        "/v1/machine": api.machine.facts,
        "/v1/machine/live": api.machine.live,
        "/v1/machine/thresholds": api.machine.thresholds,
        "/v1/runs": list_runs,
        "/v1/run_comparison": compare,
        "/v1/runs/{name}": api.runs.get,
        "/v1/runs/{name}/series": api.runs.series,
        "/v1/runs/{name}/log": api.runs.log,
        "/v1/runs/{name}/settings": settings,
        "/v1/model": api.host.state,
        "/v1/model/live": api.serving.live,
        "/v1/model/metrics": api.host.metrics,
        "/v1/conversations": list_conversations,
        "/v1/conversations/{name}": api.conversations.get,
    }
    for path, work in got.items():
        app.get(path)(_told(work))
    app.delete("/v1/runs/{name}")(_told(api.runs.delete))
    app.delete("/v1/model")(_told(api.host.unload))
    app.delete("/v1/conversations/{name}")(_told(api.conversations.remove))
    app.delete("/v1/conversations/{name}/answer")(_told(api.conversations.stop))


def _add_with_body(app: FastAPI, api: PanelsApi) -> None:
    """Routes whose work is given the path's names, then the body."""
    training, runs = api.training, api.runs
    for method, path, work in (
        ("POST", "/v1/estimate", lambda body: estimate(api.fields(body))),
        ("POST", "/v1/data/preview", lambda body: preview(api.fields(body), body.get("rows", 3))),
        ("POST", "/v1/paths/check", lambda body: check_path(body, api.allowed)),
        ("PUT", "/v1/machine/thresholds", api.machine.set_thresholds),
        ("POST", "/v1/runs", lambda body: training.start(api.fields(body))),
        ("POST", "/v1/runs/{name}/stop", lambda name, body: training.stop(name, at_once=body.get("at_once") is True)),
        ("POST", "/v1/runs/{name}/resume", lambda name, body: training.resume(name, api.fields(body))),
        ("POST", "/v1/runs/{name}/export", lambda name, body: runs.export(name, merge=body.get("merge") is True)),
        ("POST", "/v1/model", api.host.load),
        ("POST", "/v1/conversations", api.conversations.create),
        ("PATCH", "/v1/conversations/{name}", api.conversations.change),
    ):
        app.add_api_route(path, _given_body(work), methods=[method])


def _given_body(work: Callable[..., Any]) -> Callable[..., Any]:
    async def route(http: Request) -> Record:
        return await asyncio.to_thread(_told(work), *http.path_params.values(), await _body(http))

    return route


def _add_conversations(app: FastAPI, conversations: Conversations) -> None:
    @app.get("/v1/conversations/{name}/export")
    async def export(name: str, format: str = "json") -> Response:
        text, media = await asyncio.to_thread(_told(conversations.export), name, format)
        headers = {"Content-Disposition": f'attachment; filename="{name}.{format}"'}
        return Response(text, media_type=media, headers=headers)

    @app.post("/v1/conversations/{name}/answer")
    async def answer(name: str, http: Request) -> Response:
        one = await asyncio.to_thread(_told(conversations.prepare), name, await _body(http))
        return _events(conversations.begin(one))

    @app.get("/v1/conversations/{name}/answer")
    async def watch(name: str) -> Response:
        return _events(conversations.running(name))


def _events(running: Running) -> Response:
    return ClosedEvents(running.watch())
