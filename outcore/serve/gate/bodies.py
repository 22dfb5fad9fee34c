"""Bodies that requests bring: how long one may be, and how many bytes of all together are held at a time.

Short ones are not counted: connections are few enough for them, and ordinary requests are never turned away for others'
bodies. Where a longer one finds no room, the one that has been arriving longest is given up for it."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send

from outcore.common.quantities import MIB
from outcore.serve.errors import ApiError

MOST_BYTES = 16 * MIB
"""Length of one body at most, unless told."""
AT_ONCE = 8
"""So many of the longest bodies fit at a time."""
SHORT_BYTES = 1 << 16
LET_GO = "outcore.let_go"
"""Name in a request's scope of what says that its body is needed no more."""


class Bodies:
    """Bodies of one server."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes, self.held_bytes = most_bytes, 0
        self.arriving: dict[Body, None] = {}
        """Longer ones that are not whole, oldest first."""

    def check(self, length: str) -> None:
        """ApiError for a body that is announced as longer than one may be."""
        if length.isdecimal() and int(length) > self.most_bytes:
            raise self.too_long()

    def too_long(self) -> ApiError:
        """The refusal of a body that is longer than one may be."""
        return ApiError(413, f"The body is longer than {self.most_bytes} bytes, which this server takes at most.")

    def make_room(self, body: Body) -> None:
        """Give up the oldest bodies until all that are left fit, this one among them."""
        while self.held_bytes > AT_ONCE * self.most_bytes:
            oldest = next(iter(self.arriving), body)
            words = f"Bodies of {self.held_bytes >> 20} MiB are being read already. Try again in a second."
            oldest.give_up(ApiError(503, words, code="bodies_full", retry_s=1))
            if oldest is body:
                return


class Body:
    """One request's body, between server and application."""

    def __init__(self, bodies: Bodies, receive: Receive, send: Send) -> None:
        self._bodies, self._receive, self._send = bodies, receive, send
        self._size_bytes = self._held_bytes = 0
        self._is_whole = self._is_answered = False
        self._ended: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()

    async def receive(self) -> Message:
        """The next message; `http.disconnect` once the body was refused."""
        if self._is_whole:
            return await self._receive()
        coming = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({coming, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not self._ended.done():
                self._count(coming.result())
            return {"type": "http.disconnect"} if self._ended.done() else coming.result()
        finally:
            coming.cancel()

    def _count(self, message: Message) -> None:
        self._size_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._size_bytes > self._bodies.most_bytes:
            self.give_up(self._bodies.too_long())
        elif self._size_bytes > SHORT_BYTES:
            self._bodies.held_bytes += self._size_bytes - self._held_bytes
            self._held_bytes = self._size_bytes
            self._bodies.arriving.setdefault(self)
            self._bodies.make_room(self)
        if self._is_whole:
            self._bodies.arriving.pop(self, None)

    def give_up(self, error: ApiError) -> None:
        """Refuse it, wherever its reader waits."""
        self.let_go()
        self._ended.set_result(error)

    def let_go(self) -> None:
        """Count it no more: it was understood, or is read by nobody."""
        self._bodies.held_bytes -= self._held_bytes
        self._held_bytes = 0
        self._bodies.arriving.pop(self, None)

    async def send(self, message: Message) -> None:
        """Pass on what the application says; nothing of what it says of a body that was refused before."""
        if self._is_answered or not self._ended.done():
            self._is_answered = True
            await self._send(message)

    @property
    def refused(self) -> ApiError | None:
        """Why it was refused, where nothing was answered yet."""
        return self._ended.result() if self._ended.done() and not self._is_answered else None


def let_go(scope: Scope) -> None:
    """Say that the body of this request is needed no more, long before its answer ends."""
    scope.get(LET_GO, lambda: None)()
