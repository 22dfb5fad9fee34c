"""Which requests come in: those that ask for this server by its own name, that no page of another site sent, and whose
body is of the kind and length that is read. Everything that answers over HTTP stands behind it, with a key or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from outcore.serve.errors import ApiError
from outcore.serve.gate.bodies import LET_GO, MOST_BYTES, Bodies, Body
from outcore.serve.settings import is_loopback, name_of

JSON = "application/json"
FORM = "multipart/form-data"
FILES = "POST /v1/files"
TWO_LENGTHS = "two_lengths"
ANYWHERE = frozenset({"0.0.0.0", "::"})
"""Listened on, these mean every address, and are the name of none."""


class Guard:
    """ASGI middleware around everything. `hosts`: names of this server beside the address that a client reached.
    `kinds`: method and path -> the kind of body taken there, if not JSON. `refused`: told each refusal's status.
    `most_bytes`: of a body."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Iterable[str] = (),
        kinds: Mapping[str, str] | None = None,
        refused: Callable[[int], object] = lambda status: None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.app, self._refused = app, refused
        self._hosts = frozenset(hosts) - ANYWHERE
        self._kinds = kinds or {FILES: FORM}
        self._bodies = Bodies(most_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # nothing here speaks it
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            if scope["type"] == "http":
                self._check(scope, Headers(scope=scope))
        except ApiError as error:
            self._refused(error.status)
            await refusal(error, scope)(scope, receive, send)
        else:
            await (self._with_body if scope["type"] == "http" else self.app)(scope, receive, send)

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body(self._bodies, receive, send)
        scope[LET_GO] = body.let_go
        try:
            await self.app(scope, body.receive, body.send)
        except Exception:
            if body.refused is None:  # else it is what the application says of a body that broke off
                raise
        finally:
            body.let_go()
        if body.refused is not None:
            self._refused(body.refused.status)
            await refusal(body.refused, scope)(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """ApiError for a request that may not come in."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if not self._is_own(name_of(host), scope):  # a name of another site that leads here (DNS rebinding)
            raise ApiError(
                403, f"{host!r} is no name of this server. Ask for the address that it listens on, or start it with "
                "--allowed_host NAME.",
            )  # fmt: skip
        is_foreign = origin is not None and origin.lower().partition("://")[2] != host
        if is_foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise ApiError(
                403, "A page of another site may not ask this server. Programs leave Origin out; to see a page of this "
                "server, type its address.",
            )  # fmt: skip
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            raise ApiError(400, "No name here holds a NUL.")
        if "transfer-encoding" in headers and "content-length" in headers:
            raise ApiError(400, "A body ends by Content-Length or by chunks: leave one out.", code=TWO_LENGTHS)
        if scope["path"].startswith("/v1/audio"):  # before its body: sound comes as a form
            raise ApiError(404, f"There is no {scope['path']} here: sound is never read or written.")
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            wanted = self._kinds.get(f"{scope['method']} {scope['path']}", JSON)
            # JSON alone: a page of another site cannot send it without asking first, and nobody answers that
            self._bodies.check(headers.get("content-length", ""))
            if {kind.partition(";")[0].strip().lower() for kind in headers.getlist("content-type")} != {wanted}:
                raise ApiError(415, f"Content-Type must be {wanted} here (curl: -H 'Content-Type: {wanted}').")

    def _is_own(self, name: str, scope: Scope) -> bool:
        here = (scope.get("server") or ("",))[0].partition("%")[0].removeprefix("::ffff:")
        return name != "" and (name in self._hosts or name == here or (is_loopback(name) and is_loopback(here)))


def refusal(error: ApiError, scope: Scope) -> JSONResponse:
    """An error as middleware answers it. Behind a body that could be read in two ways nothing more is read."""
    headers = error.headers() | ({"Connection": "close"} if error.code == TWO_LENGTHS else {})
    return JSONResponse(error.body(scope["path"]), error.status, headers=headers)
