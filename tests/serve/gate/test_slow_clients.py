"""Clients that begin and do not go on: their connections end, and whoever is honest is answered meanwhile."""

import asyncio
import gc
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, StreamingResponse

from outcore.serve.additions import Guard, Server
from outcore.serve.gate import bodies, connections
from tests.serve.running import until

HEAD = b"POST /length HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = HEAD + b"Content-Length: 10\r\n\r\n{"
ASK, PIECES, WAIT = (
    f"GET /{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for name in ("large", "pieces", "wait")
)
LARGE = b"x" * (24 << 20)


@pytest.fixture
def served():
    """(port, what became of bodies) of an application behind guard and limits, as both of ours are."""
    app, ends = FastAPI(), []

    @app.post("/length")
    async def length(http: Request) -> PlainTextResponse:
        try:
            body = await http.body()
        except ClientDisconnect:
            ends.append("gone")
            raise
        ends.append(len(body))
        return PlainTextResponse(str(len(body)))

    @app.get("/large")
    async def large() -> PlainTextResponse:
        return PlainTextResponse(LARGE)

    @app.get("/pieces")
    async def pieces() -> StreamingResponse:
        return StreamingResponse(LARGE[at : at + (1 << 16)] for at in range(0, len(LARGE), 1 << 16))

    @app.get("/wait")
    async def wait() -> None:
        await asyncio.sleep(0.6)
        ends.append("waited")

    async def told() -> None:
        return

    app.state.tell_clients = told
    app.add_middleware(Guard)
    server = Server(app, host="127.0.0.1", port=0, log_level="critical", timeout_keep_alive=2)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()[1], ends
    server.should_exit = True
    thread.join(60)


@pytest.fixture
def short(monkeypatch):
    """Limits in tenths of a second."""
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    monkeypatch.setattr(connections, "BODY_S", 0.3)
    monkeypatch.setattr(connections, "UNREAD_S", 0.3)


@contextmanager
def begun(port: int, *words: bytes, every_s: float = 0.05):
    """A connection on which these words were sent one after the other."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        for word in words:
            try:
                client.sendall(word)
            except OSError:  # ended meanwhile
                break
            time.sleep(every_s)
        yield client


def rest_of(client: socket.socket) -> bytes:
    """What is still said until the server ends the connection."""
    found = b""
    try:
        while data := client.recv(1 << 16):
            found += data
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("words", [
    [], [HEAD], [HEAD[:10]], [bytes([letter]) for letter in HEAD * 9],
    [BODY], [HEAD + b"Content-Length: 90\r\n\r\n", *[b" "] * 90],
    [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 90],
    [HEAD.replace(b"localhost", b"evil.example") + b"Content-Length: 90\r\n\r\n", *[b" "] * 60],
], ids=["nothing", "head", "start", "drip", "body", "slow body", "slow chunks", "after the answer"])  # fmt: skip
def test_what_is_begun_and_does_not_go_on_is_ended(served, short, words):
    began_s = time.monotonic()
    with begun(served[0], *words) as client:
        said = rest_of(client)
    assert time.monotonic() - began_s < 8
    assert said.startswith(b"HTTP/1.1 408" if b"evil" not in b"".join(words) else b"HTTP/1.1 403")
    assert 90 not in served[1]


def test_a_connection_on_which_nothing_more_is_asked_is_ended(served):
    with begun(served[0], HEAD + b"Content-Length: 2\r\n\r\n{}") as client:
        assert rest_of(client).startswith(b"HTTP/1.1 200")


def test_a_body_that_comes_steadily_may_take_its_time(served, short, monkeypatch):
    monkeypatch.setattr(connections, "BYTES_PER_S", 100)
    with begun(served[0], HEAD + b"Content-Length: 300\r\n\r\n", *[b" " * 30] * 10, every_s=0.1) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 200") and served[1] == [300]


def chunked(*sizes: int) -> list[bytes]:
    """The beginning of a request whose body comes in chunks of these sizes."""
    return [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"%x\r\n%b\r\n" % (size, b" " * size) for size in sizes]]


def test_a_body_that_comes_in_chunks_is_ended_where_it_is_too_long(served, short):
    with begun(served[0], *chunked(*[1 << 20] * 17)) as client:
        assert rest_of(client).startswith(b"HTTP/1.1 413")
    assert served[1] == ["gone"]


def test_a_body_of_two_lengths_is_refused_with_all_that_follows_it(served):
    """Whoever passes requests on may end it by the other one, and take what follows for another client's."""
    port, ends = served
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + WAIT)
        said = rest_of(one)
    assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1 ") == 1 and not ends


def test_little_of_a_client_is_read_before_it_is_others_turn(served, monkeypatch):
    """Chunks of a byte held the loop for eight seconds, a quarter of a MiB of them at a time."""
    sizes, take = [], connections.Connection.data_received
    told = lambda one, data: (sizes.append(len(data)), take(one, data))[1]  # noqa: E731
    monkeypatch.setattr(connections.Connection, "data_received", told)
    pieces = (b"1\r\nx\r\n" * 20_000, b"0\r\n\r\n")
    with socket.create_connection(("127.0.0.1", served[0])) as one:
        one.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(pieces))
        assert b"HTTP/1.1 200 " in one.recv(1 << 16)
    assert served[1] == [20_000] and max(sizes) <= 4096


def test_bodies_take_so_much_memory_together_and_the_one_that_arrives_longest_makes_room(served, monkeypatch):
    """40 bodies of 15 MB that stood still held 0.6 GB."""
    monkeypatch.setattr(bodies, "AT_ONCE", 2)
    large = chunked(*[1 << 20] * 12)
    with ExitStack() as held:
        slow = [held.enter_context(begun(served[0], *large, every_s=0)) for _ in range(6)]
        until(lambda: served[1] == ["gone"] * 4)
        assert all(rest_of(client).startswith(b"HTTP/1.1 503") for client in slow[:4])
        with httpx.Client(base_url=f"http://127.0.0.1:{served[0]}", timeout=5) as honest:
            assert honest.post("/length", json={}).text == "2", "short ones are not counted"
            assert honest.post("/length", json="x" * (9 << 20)).status_code == 200
        until(lambda: served[1].count("gone") == 5)
        slow[5].sendall(b"0\r\n\r\n")
        assert slow[5].recv(12) == b"HTTP/1.1 200"
    until(lambda: 12 << 20 in served[1])


def test_the_next_request_has_all_its_time_again(served, short):
    whole = HEAD + b"Content-Length: 2\r\n\r\n{}"
    with begun(served[0], *[whole[at : at + 40] for at in range(0, len(whole), 40)], *[whole] * 6) as client:
        time.sleep(0.5)  # longer than a head may take: nothing has begun
        client.sendall(whole)
        until(lambda: len(served[1]) == 8, 5)


def test_an_answer_that_nobody_reads_is_given_up_and_one_that_is_read_slowly_is_not(served, monkeypatch):
    monkeypatch.setattr(connections, "UNREAD_S", 1.0)
    with begun(served[0], ASK, every_s=2.5) as client:
        # what the system took ahead: of megabytes it says nothing while a slow client reads the first third
        assert len(rest_of(client)) < 1 << 20
    with begun(served[0], ASK) as client:
        found = 0
        while data := client.recv(4 << 20):
            found += len(data)
            if found >= len(LARGE):
                break
            time.sleep(0.05)
    assert found >= len(LARGE)


@pytest.mark.parametrize(
    ("ask", "bytes_per_s", "is_whole"), [(ASK, 1 << 30, False), (PIECES, 1 << 30, False), (PIECES, 1 << 20, True)]
)
def test_all_of_an_answer_is_read_in_time(served, monkeypatch, ask, bytes_per_s, is_whole):
    """Who read a few bytes a minute held an answer, and its places in the queue, for hours."""
    monkeypatch.setattr(connections, "ANSWER_S", 1.0)
    monkeypatch.setattr(connections, "BYTES_PER_S", bytes_per_s)
    found = 0
    with begun(served[0], ask, every_s=0) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # or it takes megabytes at a time
        try:
            while found < len(LARGE) and (data := client.recv(1 << 17)):
                found += len(data)
                time.sleep(0.01)
        except ConnectionResetError:
            pass
    assert (found >= len(LARGE)) is is_whole


def test_a_client_that_breaks_off_after_its_answer_leaves_nothing(served):
    """The server's loop was kept busy for ever, ten minutes after the first of them."""
    with begun(served[0], HEAD + b"Content-Length: 2\r\n\r\n{}") as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        assert client.recv(12) == b"HTTP/1.1 200"
    kept = lambda: [one for one in gc.get_objects() if isinstance(one, connections.Connection)]  # noqa: E731
    until(lambda: gc.collect() >= 0 and not [one for one in kept() if one.server == ("127.0.0.1", served[0])], 20)


def test_three_hundred_slow_clients_leave_room_for_honest_ones(served, monkeypatch):
    """From the same address: where it has too many, the slowest makes room."""
    monkeypatch.setattr(connections, "most_connections", lambda: (100, 150))
    with ExitStack() as slow:
        for number in range(300):
            slow.enter_context(begun(served[0], HEAD if number % 2 else BODY, every_s=0))
        with httpx.Client(base_url=f"http://127.0.0.1:{served[0]}", timeout=5) as honest:
            assert [honest.post("/length", json={}).text for _ in range(20)] == ["2"] * 20


@pytest.mark.parametrize("most", [(2, 9), (9, 2)], ids=["of an address", "of all"])
def test_there_are_so_many_connections_and_those_that_work_are_kept(served, monkeypatch, most):
    port, ends = served
    monkeypatch.setattr(connections, "HEAD_S", 60)
    monkeypatch.setattr(connections, "most_connections", lambda: most)
    with begun(port, WAIT) as first, begun(port, WAIT) as second:
        with begun(port) as third:
            assert rest_of(third).startswith(b"HTTP/1.1 429")
        assert first.recv(12) == second.recv(12) == b"HTTP/1.1 200"
    until(lambda: ends == ["waited"] * 2)
    whole = HEAD + b"Content-Length: 2\r\n\r\n{}"
    with begun(port, PIECES) as unread, begun(port, PIECES), begun(port, whole) as new:
        assert new.recv(12) == b"HTTP/1.1 200"
        read_bytes = len(rest_of(unread))
    assert read_bytes < len(LARGE), "who does not read makes room, too"
    with begun(port, HEAD) as oldest, begun(port, HEAD), begun(port, whole) as new:
        assert new.recv(12) == b"HTTP/1.1 200" and rest_of(oldest).startswith(b"HTTP/1.1 408")
