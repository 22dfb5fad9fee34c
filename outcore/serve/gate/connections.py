"""Connections that wait for their client: how long each may, and how many an address has at a time.

uvicorn ends what is idle between requests. Here ends what begins and does not go on (half a head, half a body, answers
that nobody reads), and where an address has too many connections, the one of them that waits longest makes room."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from outcore.common.os_layer import most_open_files

HEAD_S = 10.0
"""From the first byte of a request, or a new connection, to the end of its head."""
BODY_S, BYTES_PER_S = 30.0, 16 << 10
"""A body may take BODY_S and as much more as it takes at this rate."""
UNREAD_S, ANSWER_S = 60.0, 600.0
"""An answer of which the client reads nothing for so long is given up, and one that has waited for its client, all
together, ANSWER_S longer than it takes at the rate of bodies."""
SEND_BYTES = 1 << 18
"""Bytes that the system takes ahead of a client, and more once a third was read: of its own 4 MB after a minute."""
READ_BYTES = 1 << 12
"""Bytes of a client that are read at a time: 256 KiB, asyncio's own, of one-byte chunks hold up others for seconds."""
MOST_FILES = 8192
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
TOO_MANY = b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


def most_connections() -> tuple[int, int]:
    """(of one address, of all together): half and three quarters of the files that this process may open."""
    files = min(MOST_FILES, most_open_files() or MOST_FILES)
    return files // 2, files * 3 // 4


class Connection(H11Protocol):
    """uvicorn's protocol with these limits. `waits_for`: head, body, or nothing, while the server works."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.waits_for, self.since_s, self._received_bytes = "head", self.loop.time(), 0
        self._limit: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._unread_since_s, self._looked_s, self._read_bytes, self._late_s = 0.0, 0.0, 0, 0.0

    @property
    def waits_since_s(self) -> float:
        """When it began to wait for its client, to say more or to read; infinite while the server works."""
        if self._unread is not None:
            return self._unread_since_s
        return self.since_s if self.waits_for else float("inf")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._counted, transport.max_size = Counted(transport), READ_BYTES  # type: ignore[attr-defined]
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        super().connection_made(self._counted)  # type: ignore[arg-type]
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self]
        of_address, of_all = most_connections()
        mine = [one for one in others if (one.client or ("",))[0] == (self.client or ("",))[0]]
        if (len(mine) >= of_address and not _make_room(mine)) or (len(others) >= of_all and not _make_room(others)):
            self._end(TOO_MANY)
        else:
            self._await("head")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._await("")
        self._watch(False)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._received_bytes += len(data)
        if self.waits_for == "next":  # the first byte of another request
            self._await("head")
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await("next")  # also where more of a body comes, which nobody reads: it has the time of a head
        self._look()
        self._watch(False)
        self._late_s = 0.0
        self._watch(self.flow.write_paused or self.transport.is_closing())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch(self.transport.is_closing())

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():  # uvicorn's timer outlives a connection that its client broke off
            self.give_up()

    def _look(self) -> None:
        """Find out what the request that has begun waits for now."""
        if self.cycle is not None and not self.cycle.response_complete:
            waits_for = "body" if self.cycle.more_body else ""
            if waits_for != self.waits_for:
                self._await(waits_for)

    def _await(self, what: str) -> None:
        self.waits_for, self.since_s, self._received_bytes = what, self.loop.time(), 0
        if self._limit is not None:
            self._limit.cancel()
        seconds = {"head": HEAD_S, "body": BODY_S}.get(what)  # between requests uvicorn's own limit counts
        self._limit = self.loop.call_later(seconds, self._too_slow) if seconds else None

    def _too_slow(self) -> None:
        left_s = self.since_s + BODY_S + self._received_bytes / BYTES_PER_S - self.loop.time()
        if self.waits_for == "body" and (left_s > 0 or self.flow.read_paused):
            self._limit = self.loop.call_later(max(left_s, 1.0), self._too_slow)
        else:
            self.give_up()

    def give_up(self) -> None:
        """End a connection whose client is too slow."""
        has_begun = self.waits_for == "next" or (self.cycle is not None and self.cycle.response_started)
        self._end(b"" if has_begun else TOO_SLOW)

    def _end(self, words: bytes) -> None:
        self._await("")
        self.transport.write(words)
        self.transport.close()
        self._watch(True)

    def _watch(self, is_on: bool) -> None:
        """Look, while it is on, whether the client reads what was written, and all of an answer in time."""
        now_s = self.loop.time()
        read_bytes = self._counted.written_bytes - self.transport.get_write_buffer_size()
        self._late_s -= (read_bytes - self._read_bytes) / BYTES_PER_S
        if self._unread is None:
            self._unread_since_s = now_s
        else:
            self._unread.cancel()
            self._late_s += now_s - self._looked_s
        self._looked_s, self._read_bytes = now_s, read_bytes
        wait_s = min(UNREAD_S, ANSWER_S - self._late_s)
        self._unread = self.loop.call_later(wait_s, self._read_on) if is_on else None

    def _read_on(self) -> None:
        before_bytes = self._read_bytes
        self._watch(True)
        if self._read_bytes == before_bytes:  # at once, where all of the answer is late
            self.transport.abort()


class Counted:
    """A transport that counts what is written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self.written_bytes = transport, 0

    def write(self, data: bytes) -> None:
        """Write and count."""
        self.written_bytes += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _make_room(among: Iterable[Connection]) -> bool:
    """End the connection that has waited longest for its client. False where the server works for each."""
    longest = min(among, key=lambda one: one.waits_since_s)
    if is_waiting := longest.waits_since_s < float("inf"):
        longest.give_up() if longest._unread is None else longest.transport.abort()
    return is_waiting
