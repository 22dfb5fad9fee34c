"""Errors in the shape that OpenAI's clients read, and the ids by which a client's request is found in a log."""

from __future__ import annotations

import re
import uuid
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

KINDS = {  # by status; others are by their hundred
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
}
MESSAGES_KINDS = KINDS | {
    409: "invalid_request_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
"""Kinds of errors as Anthropic's clients know them."""
STOPS = "The server stops. Ask again when it has started."


class ApiError(Exception):
    """Error that a client is told; `param`: the field of its request that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_s = status, message, param, code, retry_s

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON that is sent, in a shape that clients of OpenAI's and of Anthropic's API read. Where they name a
        kind of error differently, `path` says whose client asks."""
        kinds = MESSAGES_KINDS if path.startswith("/v1/messages") else KINDS
        kind = kinds.get(self.status, kinds[500] if self.status >= 500 else "invalid_request_error")
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"type": "error", "error": told}

    def headers(self) -> dict[str, str]:
        """With when to try again, where that is known."""
        found = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def gone() -> ApiError:
    """Nobody reads what would be sent."""
    return ApiError(499, "The client went away.")


def stops() -> ApiError:
    """The server ends before the answer does."""
    return ApiError(503, STOPS, code="server_stopping")


REQUEST_ID = "x-request-id"
_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


class RequestIds:
    """Middleware that gives each answer the id of its request: the client's own (`X-Request-Id`), or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == REQUEST_ID.encode()), "")
        found = scope[REQUEST_ID] = given if _ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = found
            await send(message)

        await self._app(scope, receive, named)
