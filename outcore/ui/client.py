"""HTTP client of the panels' routes, for panels and scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx

Record = dict[str, Any]
GONE = "The panels' server does not answer. Start it again with outcore ui; runs go on without it, and nothing is lost."


class ClientError(RuntimeError):
    """Error of a call: a route's refusal, in its own words, or no answer; `param`: the field it is about."""

    def __init__(self, message: str, status: int = 0, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class Client:
    """`base`: the panels' address; `token`: where one is needed. Every call raises ClientError."""

    def __init__(self, base: str, token: str = "", timeout_s: float = 120.0) -> None:
        self.base = base
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout_s, trust_env=False)

    def get(self, *path: str, **query: Any) -> Any:
        """GET /v1/PATH."""
        return self._ask("GET", path, params={k: v for k, v in query.items() if v is not None})

    def post(self, *path: str, **body: Any) -> Any:
        """POST /v1/PATH with a JSON object."""
        return self._ask("POST", path, json=body)

    def put(self, *path: str, **body: Any) -> Any:
        """PUT /v1/PATH with a JSON object."""
        return self._ask("PUT", path, json=body)

    def patch(self, *path: str, **body: Any) -> Any:
        """PATCH /v1/PATH with a JSON object."""
        return self._ask("PATCH", path, json=body)

    def delete(self, *path: str) -> Any:
        """DELETE /v1/PATH."""
        return self._ask("DELETE", path)

    def events(self, *path: str, **body: Any) -> Iterator[Record]:
        """Server-sent events of POST /v1/PATH."""
        return self._events("POST", path, json=body)

    def watch(self, *path: str) -> Iterator[Record]:
        """Server-sent events of GET /v1/PATH."""
        return self._events("GET", path)

    def _events(self, method: str, path: tuple[str, ...], **more: Any) -> Iterator[Record]:
        try:
            with self._http.stream(method, _url(path), timeout=httpx.Timeout(None, connect=5.0), **more) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise _error_of(answer)
                for line in answer.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield json.loads(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise ClientError(GONE) from error

    def _ask(self, method: str, path: tuple[str, ...], **more: Any) -> Any:
        try:
            answer = self._http.request(method, _url(path), **more)
        except httpx.TimeoutException as error:
            raise ClientError("That took longer than two minutes. Look again later.") from error
        except httpx.HTTPError as error:
            raise ClientError(GONE) from error
        if answer.status_code >= 400:
            raise _error_of(answer)
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else answer.text


def _url(path: tuple[str, ...]) -> str:
    return "/v1/" + "/".join(quote(part, safe="") for part in path)


def _error_of(answer: httpx.Response) -> ClientError:
    try:
        error = answer.json()["error"]
        return ClientError(error["message"], answer.status_code, error.get("param"), error.get("code"))
    except (ValueError, KeyError, TypeError):
        return ClientError(f"The server answered with status {answer.status_code}.", answer.status_code)
