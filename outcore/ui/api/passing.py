"""Requests that the loaded model's server answers, passed on as they come: bodies, streams, clients that go away."""

from __future__ import annotations

import asyncio

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from outcore.serve.additions import ApiError
from outcore.ui.api.model import ModelHost

ALWAYS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models", "/tokenize",
          "/detokenize", "/v1/files", "/v1/batches", "/v1/launch", "/classify", "/rerank", "/v1/rerank")  # fmt: skip
"""Only a loaded model answers these."""
EVALUATIONS = "/v1/evaluations"
"""Reading the history needs no model; whatever changes something does, but deleting."""
KEPT = ("content-type", "retry-after", "content-disposition", "x-outcore-ignored-fields", "cache-control")


class PassOn:
    """ASGI middleware over the panels' application."""

    def __init__(self, app: ASGIApp, host: ModelHost) -> None:
        self.app, self.host = app, host
        self.client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), trust_env=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_the_models(scope["path"], scope["method"]):
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ApiError as error:
            response = JSONResponse(error.body(), error.status, headers=error.headers())
        except httpx.HTTPError as error:
            why = str(error).rstrip(".") or type(error).__name__
            told = ApiError(502, f"The model's server broke off: {why}.", code="broken_off")
            response = JSONResponse(told.body(), told.status)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        base, headers = await asyncio.to_thread(self.host.address)
        kind = request.headers.get("content-type")
        sent = self.client.build_request(
            request.method,
            f"{base}{request.url.path}",
            params=request.url.query.encode(),
            headers=headers | ({"content-type": kind} if kind else {}),
            content=request.stream() if request.method in ("POST", "PUT", "PATCH") else None,
        )
        answer = await self.client.send(sent, stream=True)
        kept = {name: answer.headers[name] for name in KEPT if name in answer.headers}

        async def body():
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:  # also when the client went away: the model's server then ends the answer
                await answer.aclose()

        return StreamingResponse(body(), answer.status_code, headers=kept)


def _is_the_models(path: str, method: str) -> bool:
    if ".." in path.split("/"):  # it would name another route of the model's server
        return False
    if any(path == one or path.startswith(f"{one}/") for one in ALWAYS):
        return True
    return path.startswith(EVALUATIONS) and method == "POST"
