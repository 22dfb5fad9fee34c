"""Our address in front of another server: keys, limits, records and metrics are ours, answers its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.requests import Request as HttpRequest

from outcore.common.output import say
from outcore.common.quantities import counted
from outcore.serve.app import ClosedEvents, add_errors, add_gate, while_connected
from outcore.serve.body import read_body
from outcore.serve.errors import ApiError, stops
from outcore.serve.gate import let_go
from outcore.serve.handover.process import ServerProcess
from outcore.serve.prompt_scores import SplicedJSON
from outcore.serve.settings import ServeSettings
from outcore.serve.watch import Records, RequestMetrics

ANSWERS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
PLAIN = ("/v1/models", "/tokenize", "/detokenize")
TEXTS = frozenset({"messages", "prompt", "input"})
RETRY_S = 10


class Answered:
    """One request, from its body to what the record says of it."""

    def __init__(self, body: dict[str, Any], endpoint: str) -> None:
        self.body, self.endpoint, self.began_s = body, endpoint, time.monotonic()
        self.first_s: float | None = None
        self.name, self.finish, self.usage, self.error = "", {}, {}, ""
        options = body.get("stream_options")
        self.asks_usage = isinstance(options, dict) and bool(options.get("include_usage"))

    def heard(self, event: dict[str, Any]) -> None:
        """Take a whole answer's body, or an event of one that streams."""
        event = event.get("response") or event
        self.first_s = self.first_s or time.monotonic()
        self.name = event.get("id") or self.name
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            if reason := choice.get("finish_reason"):
                self.finish[choice.get("index", 0)] = reason
        if event.get("error"):
            self.error = str(event["error"])

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the prompt, and of all answers together."""
        prompt = self.usage.get("prompt_tokens") or self.usage.get("input_tokens") or 0
        return prompt, self.usage.get("completion_tokens") or self.usage.get("output_tokens") or 0

    def note(self, metrics: RequestMetrics, records: Records) -> None:
        """Count it and write its record."""
        total_s = time.monotonic() - self.began_s
        first_s = (self.first_s or time.monotonic()) - self.began_s
        prompt, answer = self.tokens
        reasons = self.finish or {0: "error" if self.error else "stop" if self.usage else "cancelled"}
        for reason in reasons.values():
            metrics.finished.labels(reason).inc()
        metrics.written(answer, first_s, total_s)
        metrics.prompt_tokens.inc(prompt)
        metrics.cached_tokens.inc((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        entry = {
            "time": time.time(),
            "request": self.name,
            "endpoint": self.endpoint,
            "sampling": {name: value for name, value in self.body.items() if name not in TEXTS},
            "seed": self.body.get("seed"),
            "prompt_tokens": prompt,
            "answer_tokens": answer,
            "finish": ", ".join(reasons.values()),
            "error": self.error,
            "timings": {"first_token_s": first_s, "total_s": total_s},
        }
        if records.with_text:
            entry |= {name: self.body[name] for name in TEXTS if name in self.body}
        records.write(entry)


class Forwarder:
    """Sends requests on to the process."""

    def __init__(
        self, process: ServerProcess, key: str, settings: ServeSettings, metrics: RequestMetrics, records: Records
    ) -> None:
        self.process, self.settings, self.metrics, self.records = process, settings, metrics, records
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(settings.request_timeout_s, connect=10.0)
        headers = {"Authorization": f"Bearer {key}"}
        self.client = httpx.AsyncClient(
            base_url=process.url, headers=headers, timeout=timeout, limits=limits, trust_env=False
        )
        self.num_under_way, self._stopping = 0, asyncio.Event()
        metrics.gauge("running_answers", "Requests under way", lambda: self.num_under_way)
        metrics.gauge("engine_up", "1 while the engine answers", lambda: process.state == "up")
        metrics.gauge("engine_restarts", "New starts of the engine", lambda: process.restarts)

    async def tell_clients(self) -> None:
        """Take no more requests, and tell clients that wait for answers that the server stops."""
        if self.num_under_way:
            say(f"stopping: who waits for {counted(self.num_under_way, 'answer')} is told")
        self._stopping.set()

    async def send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """The response, its content not read yet. ApiError where there is none."""
        if self._stopping.is_set():
            raise stops()
        if self.process.state != "up":
            raise ApiError(503, f"The engine is {self.process.state}.", code="engine_down", retry_s=RETRY_S)
        with self._failing():
            return await self.client.send(self.client.build_request(method, path, json=body), stream=True)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            limit = f"{self.settings.request_timeout_s:.0f} s"
            raise ApiError(408, f"The engine did not answer within {limit}.", code="timeout") from error
        except httpx.HTTPError as error:
            words = f"The engine went away ({type(error).__name__}); it is started again."
            raise ApiError(503, words, code="engine_down", retry_s=RETRY_S) from error

    async def read(self, response: httpx.Response) -> Any:
        """The whole JSON of a response. ApiError where it does not come, or is none."""
        try:
            with self._failing():
                return json.loads(await response.aread())
        except ValueError:
            raise ApiError(502, f"The engine answered {response.status_code} and no JSON.") from None
        finally:
            await response.aclose()

    async def answer(self, http: HttpRequest) -> Response:
        """A request for answers, counted and recorded."""
        path = http.url.path
        body = await read_body(http, self.settings.max_body_bytes)
        if self.num_under_way >= self.settings.max_queue:
            words = f"{self.num_under_way} requests are under way, and this server takes no more. Try again later."
            raise ApiError(429, words, code="queue_full", retry_s=RETRY_S)
        answered = Answered(body, path)
        sent = body
        if body.get("stream") and path != "/v1/responses":  # tokens are counted by the engine; told where asked for
            sent = body | {"stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}
        self.num_under_way += 1
        let_go(http.scope)  # an engine of its own answers, so that many may be long
        async with AsyncExitStack() as held:
            held.callback(self._leave)
            response = await while_connected(http, self.send("POST", path, sent), self._stopping.is_set)
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                held.callback(answered.note, self.metrics, self.records)
                held.push_async_callback(response.aclose)
                return ClosedEvents(self._events(response, answered), held.pop_all())
            content = await while_connected(http, self.read(response), self._stopping.is_set)
            if response.status_code == 200:
                answered.heard(content)
                answered.note(self.metrics, self.records)
            else:
                self.metrics.refuse(response.status_code)
            return SplicedJSON(content, held, status_code=response.status_code)

    def _leave(self) -> None:
        self.num_under_way -= 1

    async def _events(self, response: httpx.Response, answered: Answered) -> AsyncGenerator[dict[str, str], None]:
        """Events as they come, but for a count of tokens that only we asked for."""
        event: dict[str, str] = {}
        async with aclosing(self._lines(response)) as lines:
            try:
                async for line in lines:
                    name, _, value = line.partition(":")
                    if name in ("event", "data"):
                        event[name] = value.removeprefix(" ")
                    elif not line and "data" in event:
                        data = {} if event["data"] == "[DONE]" else json.loads(event["data"])
                        answered.heard(data) if data else None
                        if answered.asks_usage or data.get("choices") != [] or not data.get("usage"):
                            yield event
                        event = {}
            except ApiError as error:
                answered.error = error.message
                yield {"data": json.dumps(error.body())}
            except (httpx.HTTPError, ValueError) as error:  # it died: the client must not take it for the end
                answered.error = f"the engine went away ({type(error).__name__})"
                yield {"data": json.dumps(ApiError(503, answered.error, code="engine_down").body())}

    async def _lines(self, response: httpx.Response) -> AsyncGenerator[str, None]:
        """Lines as they come. ApiError when the server stops before the last one."""
        lines, stopping = response.aiter_lines(), asyncio.ensure_future(self._stopping.wait())
        line = asyncio.ensure_future(anext(lines, None))
        try:
            while True:
                await asyncio.wait({line, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not line.done():
                    raise stops()
                if (text := line.result()) is None:
                    return
                yield text
                line = asyncio.ensure_future(anext(lines, None))
        finally:
            line.cancel()  # also when the client went away, or it would go on reading what is closed behind it
            stopping.cancel()

    async def plain(self, http: HttpRequest) -> Response:
        """A small request, handed through."""
        body = await read_body(http, self.settings.max_body_bytes) if http.method == "POST" else None
        response = await self.send(http.method, http.url.path, body)
        return JSONResponse(await self.read(response), response.status_code)

    async def metrics_page(self) -> str:
        """Our numbers, then the engine's own."""
        page = self.metrics.page().decode()
        try:
            response = await self.send("GET", "/metrics", None)
            return page + (await response.aread()).decode()
        except (ApiError, httpx.HTTPError):
            return page


def create_proxy(forwarder: Forwarder, launch: Mapping[str, Any]) -> FastAPI:
    """The application; the process ends with it. `launch`: how the model is laid out."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await forwarder.client.aclose()
        await asyncio.to_thread(forwarder.process.stop)
        forwarder.records.close()

    app = FastAPI(title="outcore", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.tell_clients = forwarder.tell_clients
    add_errors(app, forwarder.metrics.refuse)
    add_gate(app, forwarder.settings, forwarder.metrics.refuse)

    @app.get("/health")
    @app.head("/health", operation_id="health_head")
    async def health() -> JSONResponse:
        process = forwarder.process
        found = {"status": "ok" if process.state == "up" else process.state, "running": forwarder.num_under_way}
        return JSONResponse(
            found | {"restarts": process.restarts, "why": process.why}, 200 if process.state == "up" else 503
        )

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(await forwarder.metrics_page(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/launch")
    async def laid_out() -> JSONResponse:
        return JSONResponse(dict(launch))

    @app.post("/v1/evaluations")
    async def evaluations() -> JSONResponse:
        raise ApiError(
            409,
            "Evaluations here need our own engine's scores, and this model is served by vLLM. Load it on one GPU "
            "(degrees of 1; what VRAM does not hold streams), or ask this address with lm_eval --model "
            "local-completions.",
            code="other_engine",
        )

    for path in ANSWERS:
        app.post(path)(forwarder.answer)
    for path in PLAIN:
        app.api_route(path, methods=["GET"] if path == "/v1/models" else ["POST"])(forwarder.plain)
    return app
