"""The HTTP application over one service: routes, keys, limits, errors in one shape, clients that go away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from outcore.common.output import say
from outcore.common.quantities import counted
from outcore.serve import completions, plain
from outcore.serve.body import ignored_header, object_of, read_bytes
from outcore.serve.errors import REQUEST_ID, ApiError, RequestIds, gone, stops
from outcore.serve.gate import Guard, KeyCheck, Keys, let_go
from outcore.serve.jobs import Batches, Files, add_jobs
from outcore.serve.models import Models
from outcore.serve.prompt_scores import SplicedJSON
from outcore.serve.protocols import PROTOCOLS, count_tokens
from outcore.serve.service import Service
from outcore.serve.settings import ServeSettings

logger = logging.getLogger(__name__)
STOP_WITHIN_S = 5
"""Connections that are still open so long after the server was told to stop are cut."""
PING_EVERY_S = 15
"""A stream that says nothing for so long gets a comment."""
LOOK_EVERY_S = 0.1
"""Seconds between two looks whether a client that waits for a whole answer is still there."""


class Addition(Protocol):
    """Routes of a room above, with work of their own."""

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        ...

    def begin(self) -> None:
        """The server has started; called on its event loop."""
        ...

    async def end(self) -> None:
        """The server ends; the service is still there."""
        ...


def create_app(service: Service, additions: Sequence[Addition] = (), models: Models | None = None) -> FastAPI:
    """The application; the service is started and closed with it. `models`: what is served beside it."""
    models = models or Models(service)
    logs = service.settings.logs
    batches = Batches(service, Files(logs / "files"), logs / "batches")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        batches.go_on()
        for addition in additions:
            addition.begin()
        try:
            yield
        finally:
            for addition in additions:
                await addition.end()
            await batches.stop()
            await models.close()
            await asyncio.to_thread(service.close)

    async def tell_clients() -> None:
        if count := service.num_under_way:
            say(f"stopping: who waits for {counted(count, 'answer')} is told; the pass under way ends first")
        await batches.stop()
        models.end_answers()

    app = FastAPI(title="outcore", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.tell_clients = tell_clients
    add_errors(app, service.metrics.refuse)
    add_gate(app, service.settings, service.metrics.refuse)
    app.add_middleware(RequestIds)
    _add_plain(app, models)
    add_jobs(app, service, batches)
    _add_answers(app, models, "/v1/completions", completions.CompletionCall, completions.whole, completions.events)
    for protocol in PROTOCOLS:
        _add_answers(app, models, *protocol)
    _add_answers(app, models, "/v1/embeddings", plain.EmbeddingCall, plain.embedded, None)
    _add_answers(app, models, "/classify", plain.ClassifyCall, plain.classified, None)
    for path in ("/rerank", "/v1/rerank"):
        _add_answers(app, models, path, plain.RerankCall, plain.reranked, None)
    for addition in additions:
        addition.add_to(app)
    return app


def add_errors(app: FastAPI, refused: Callable[[int], object] = lambda status: None) -> None:
    """Errors of routes in one shape. `refused`: told the status of each."""

    def answer(http: HttpRequest, error: ApiError) -> JSONResponse:
        refused(error.status)
        return JSONResponse(error.body(http.url.path), error.status, headers=error.headers())

    @app.exception_handler(ApiError)
    async def told(http: HttpRequest, error: ApiError) -> JSONResponse:
        return answer(http, error)

    @app.exception_handler(HTTPException)
    async def routing(http: HttpRequest, error: HTTPException) -> JSONResponse:
        words = f"There is no {http.url.path} here." if error.status_code == 404 else str(error.detail)
        return answer(http, ApiError(error.status_code, words))

    @app.exception_handler(RequestValidationError)
    async def invalid(http: HttpRequest, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return answer(http, ApiError(400, f"{first['loc'][-1]}: {first['msg']}.", param=str(first["loc"][-1])))

    @app.exception_handler(Exception)
    async def unknown(http: HttpRequest, error: Exception) -> JSONResponse:
        named = {REQUEST_ID: http.scope.get(REQUEST_ID, "")}  # this answer does not go through `RequestIds`
        logger.exception("a request failed: %s", named[REQUEST_ID])
        reply = answer(http, ApiError(500, "The server failed; its log says why."))
        reply.headers.update(named)
        return reply


def add_gate(app: FastAPI, settings: ServeSettings, refused: Callable[[int], object]) -> None:
    """Let in who may come in: first by the guard, then with a key where keys were given."""
    if settings.api_keys:
        app.add_middleware(KeyCheck, keys=Keys(settings.api_keys), refused=refused)
    hosts = (settings.host.lower(), *settings.allowed_hosts)
    app.add_middleware(Guard, hosts=hosts, refused=refused, most_bytes=settings.max_body_bytes)


def _add_plain(app: FastAPI, models: Models) -> None:
    service = models.first

    @app.get("/v1/models")
    async def listed() -> dict[str, Any]:
        return plain.listed(models)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return plain.described(models, models.find(name)[0])

    @app.get("/health")
    @app.head("/health", operation_id="health_head")
    async def health() -> JSONResponse:
        status, body = plain.health(service)
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def metrics(model: str | None = None) -> PlainTextResponse:
        page = models.loaded(model).metrics.page()
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    @app.post("/tokenize")
    async def tokenize(http: HttpRequest) -> dict[str, Any]:
        async with _understood(http, models, plain.tokenize) as (_, found):
            return found

    @app.post("/v1/messages/count_tokens")
    async def counted(http: HttpRequest) -> dict[str, Any]:
        async with _understood(http, models, count_tokens) as (_, found):
            return found

    @app.post("/detokenize")
    async def detokenize(http: HttpRequest) -> dict[str, Any]:
        async with _understood(http, models, plain.detokenize) as (_, found):
            return found


@asynccontextmanager
async def _understood(
    http: HttpRequest, models: Models, understand: Callable[[Service, dict[str, Any]], Any]
) -> AsyncIterator[tuple[Service, Any]]:
    """(who answers, what a body means to `understand`). A place is taken until then, so that only so many wait for it:
    of the first model until the body is read, then of the model that is asked; who answers stays open until this is
    left."""
    first = models.first
    data = await read_bytes(http, first.settings.max_body_bytes)

    async def read() -> tuple[Service, Any]:
        with placed(first):
            body = await asyncio.to_thread(object_of, data)
        service = await held.enter_async_context(models.held(body.get("model")))
        with placed(service):
            return service, await service.reading.of(body, len(data), understand, service, body)

    async with AsyncExitStack() as held:
        try:
            found = await while_connected(http, read(), lambda: first.is_stopping)
        finally:
            let_go(http.scope)
        yield found


@contextmanager
def placed(service: Service) -> Iterator[None]:
    """Hold a place of this service."""
    service.take_place()
    try:
        yield
    finally:
        service.leave_place()


def _add_answers(
    app: FastAPI,
    models: Models,
    path: str,
    understand: Callable[[Service, dict[str, Any]], Any],
    whole: Callable[[Any], Awaitable[dict[str, Any]]],
    events: Callable[[Any], AsyncGenerator[dict[str, str], None]] | None,
) -> None:
    @app.post(path)
    async def post(http: HttpRequest) -> Response:
        async with _understood(http, models, understand) as (service, call):
            service.take_place(places := call.places)
        headers = ignored_header(call.ignored)
        held = AsyncExitStack()
        held.callback(service.leave_place, places)
        if call.is_stream and events is not None:
            return ClosedEvents(events(call), held, headers)
        async with held:
            return SplicedJSON(await while_connected(http, whole(call), lambda: service.is_stopping), held, headers)


class ClosedEvents(Response):
    """Server-sent events whose source is closed with the response, also when the client went away in mid-stream: what
    the source holds (a place, a running request) is free at once, not when the garbage collector comes by. `held`:
    what the source lets go in its end, for clients that went away before it began."""

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[dict[str, str], None],
        held: AsyncExitStack | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
        self._source, self._held = source, held or AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        beside = [asyncio.ensure_future(work) for work in (_disconnected(receive), _ping(send))]
        try:
            await asyncio.wait([writing, beside[0]], return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (writing, *beside):
                task.cancel()
            await asyncio.gather(writing, *beside, return_exceptions=True)
            async with self._held:
                await self._source.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._source:
            lines = "".join(f"{name}: {value}\n" for name, value in event.items())
            await send({"type": "http.response.body", "body": f"{lines}\n".encode(), "more_body": True})
        await self._held.aclose()  # before the end is told: who has heard it may ask for a place at once
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ping(send: Send) -> None:
    """Comments that keep proxies and clients from giving up an answer that is slow to begin."""
    while True:
        await asyncio.sleep(PING_EVERY_S)
        await send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})


async def while_connected(http: HttpRequest, work: Awaitable[Any], is_stopping: Callable[[], bool]) -> Any:
    """The result of `work`, which is cancelled when the client goes away, or the server stops."""
    task = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=LOOK_EVERY_S)
            if done:
                return task.result()
            if is_stopping():
                raise stops()
            if await http.is_disconnected():
                raise gone()
    finally:
        task.cancel()
