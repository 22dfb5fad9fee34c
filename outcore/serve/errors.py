"""Errors in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


STOPS = "The server stops. Ask again when it has started."


class ApiError(Exception):
    """What a client is told; `param`: the field it is about."""

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

    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        kind = KINDS.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

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
