"""Keys of which a request must show one, and how fast an address may guess them."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outcore.serve.errors import ApiError
from outcore.serve.gate.guard import refusal

OPEN_PATHS = frozenset({"/health"})
"""Answered without a key: whoever watches over the server need not know it."""
GUESS_S, FREE_GUESSES, MOST_WAIT_S = 1.0, 5, 10.0
"""An address has so many wrong keys at once, then one in GUESS_S; what would wait longer than MOST_WAIT_S gets 429."""
MOST_ADDRESSES = 10_000


class Keys:
    """Keys that are known. `words`: what they are called to people."""

    def __init__(self, keys: Sequence[str], words: str = "API key", code: str = "invalid_api_key") -> None:
        self._keys = [key.encode() for key in keys]
        self._words, self._code = words, code
        self._owed_until_s: dict[str, float] = {}

    async def check(self, given: bytes, scope: Scope) -> None:
        """ApiError for a key that is missing, wrong, or guessed too fast. The right one waits as long as a wrong one,
        or waiting would tell them apart."""
        address, now_s = (scope.get("client") or ("",))[0], time.monotonic()
        right = [hmac.compare_digest(given, key) for key in self._keys]  # all of them: the time tells nothing
        owed_until_s = max(now_s, self._owed_until_s.get(address, 0.0))
        wait_s = owed_until_s - now_s - (FREE_GUESSES - 1) * GUESS_S
        if given and wait_s > MOST_WAIT_S:
            words = f"Too many wrong ones came from {address}. Try again later."
            raise ApiError(429, words, code="too_many_guesses", retry_s=int(wait_s))
        if given and (wait_s > 0 or not any(right)):
            if len(self._owed_until_s) >= MOST_ADDRESSES:
                self._owed_until_s.clear()
            self._owed_until_s[address] = owed_until_s + GUESS_S
            await asyncio.sleep(wait_s)
            if any(right):
                self._owed_until_s[address] = self._owed_until_s.get(address, 0.0) - GUESS_S
        if not any(right):
            raise ApiError(401, f"The {self._words} is missing or wrong.", code=self._code)


def bearer_of(scope: Scope) -> bytes:
    """The key of `Authorization: Bearer KEY`, or of `X-Api-Key`, as Anthropic's clients send it; b'' without one."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
    return given.encode("latin-1")


class KeyCheck:
    """ASGI middleware: a key on every path but those that are open. `refused`: told the status of each refusal."""

    def __init__(self, app: ASGIApp, keys: Keys, refused: Callable[[int], object]) -> None:
        self.app, self._keys, self._refused = app, keys, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
                await self._keys.check(bearer_of(scope), scope)
        except ApiError as error:
            self._refused(error.status)
            await refusal(error, scope)(scope, receive, send)
        else:
            await self.app(scope, receive, send)
