"""Many streams at once against a server, for minutes: errors, waits, memory.

    python -m tests.serve.load --streams 200 --seconds 300          (tiny model, CPU)
    python -m tests.serve.load --url http://127.0.0.1:8000 --model NAME --streams 64 --seconds 60
    python -m tests.serve.load --streams 20 --slow 300 --seconds 40     (beside clients that never end)

Every stream asks again as soon as it was answered. A stream must end with a finish reason and [DONE]. Without --url a
server over a tiny random model runs in this process, whose memory is then read after a warm-up and at the end.

With --slow a process of its own holds so many half requests (half of them half heads, half of them half bodies; each
gets another byte a second, and is begun anew when the server ends it), and without --url `outcore serve` is a process,
too. The seconds are shared by --rounds rounds, each alone, then beside them: how much later first words come is
`first_word_ratio`, of medians and of 95th percentiles over all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import psutil

WORDS = "the quick brown fox jumps over a lazy dog and then it rests for the day".split()  # noqa: SIM905


@dataclass
class Tally:
    """What happened."""

    answers: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    left_early: int = 0
    per_stream: dict[int, int] = field(default_factory=dict)


async def one_answer(host: str, port: int, model: str, number: int, generator: random.Random, tally: Tally) -> None:
    """Ask for a stream and read it; one in twenty is left in the middle."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": " ".join(generator.choices(WORDS, k=generator.randint(1, 40)))}],
        "max_tokens": generator.randint(4, 32),
        "stream": True,
        "ignore_eos": True,
        "seed": generator.randint(0, 1000),
    }
    leaves = generator.random() < 0.05
    data = json.dumps(body).encode()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        fields = f"Host: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close"
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        status = (await reader.readline()).decode().split(" ", 2)
        if status[1] != "200":
            tally.errors.append(f"status {status[1]}")
            await asyncio.sleep(0.2)
            return
        finished = done = False
        while line := await reader.readline():
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                done = True
                break
            chunk = json.loads(payload)
            if "error" in chunk:
                tally.errors.append(chunk["error"]["message"])
                return
            choice = chunk["choices"][0]
            if choice["delta"].get("content") and len(tally.first_s) < 10**6:
                if not finished and choice["delta"]["content"]:
                    tally.tokens += 1
                if tally.per_stream.get(-number) is None:
                    tally.per_stream[-number] = 1
                    tally.first_s.append(time.perf_counter() - began)
                if leaves:
                    tally.left_early += 1
                    return
            finished = finished or choice["finish_reason"] is not None
        if not (done and finished):
            tally.errors.append("a stream ended without a finish reason or [DONE]")
            return
        tally.answers += 1
        tally.whole_s.append(time.perf_counter() - began)
        tally.per_stream[number] = tally.per_stream.get(number, 0) + 1
    finally:
        tally.per_stream.pop(-number, None)
        writer.close()


def dawdle_all(slow: int, host: str, port: int, are_held: Event) -> None:
    """Hold so many half requests until this process is ended. `are_held`: set once all have begun."""
    begun = 0

    async def dawdle(number: int) -> None:
        nonlocal begun
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
                writer.write(head + b"Content-Length: 1000\r\n\r\n{" * (number % 2))
                begun += 1
                if begun == slow:
                    are_held.set()
                while not writer.is_closing():
                    await asyncio.sleep(1)
                    writer.write(b"x")
                    await writer.drain()
            except OSError:
                pass

    async def dawdling() -> None:
        await asyncio.gather(*(dawdle(number) for number in range(slow)))

    asyncio.run(dawdling())


@contextmanager
def beside(slow: int, host: str, port: int) -> Iterator[None]:
    """Meanwhile so many slow clients, which share no interpreter with those that are timed."""
    context = multiprocessing.get_context("spawn")
    are_held = context.Event()
    process = context.Process(target=dawdle_all, args=(slow, host, port, are_held), daemon=True)
    process.start()
    try:
        if not are_held.wait(30):
            raise RuntimeError(f"{slow} slow clients did not come in within 30 s")
        yield
    finally:
        process.kill()
        process.join()


async def run(host: str, port: int, model: str, streams: int, seconds: float) -> Tally:
    """All streams for so long."""
    tally, until = Tally(), time.perf_counter() + seconds

    async def stream(number: int) -> None:
        generator = random.Random(number)
        while time.perf_counter() < until:
            try:
                await one_answer(host, port, model, number, generator, tally)
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                tally.errors.append(f"{type(error).__name__}: {error}")

    await asyncio.gather(*(stream(number) for number in range(1, streams + 1)))
    return tally


def compare(alone: list[Tally], beside: list[Tally]) -> dict[str, Any]:
    """First words of rounds alone, and beside slow clients."""

    def of(tallies: list[Tally]) -> dict[str, float]:
        waits_s = [wait_s for tally in tallies for wait_s in tally.first_s]
        return {"median": statistics.median(waits_s), "p95": statistics.quantiles(waits_s, n=20)[-1]}

    before_s, after_s = of(alone), of(beside)
    rounds = [of([b])["median"] / of([a])["median"] for a, b in zip(alone, beside, strict=True)]
    return {
        "first_word_alone_s": before_s,
        "first_word_beside_s": after_s,
        "first_word_ratio": {name: after_s[name] / before_s[name] for name in before_s},
        "median_ratio_by_round": rounds,
    }


@contextmanager
def address(url: str | None, folder: Path) -> Iterator[str]:
    """The one that was told, or that of an `outcore serve` over a tiny model."""
    if url is not None:
        yield url
        return
    from tests.infer.models import save_tiny_model
    from tests.serve.running import served

    save_tiny_model(folder / "tiny")
    flags = ["--device=cpu", "--context=256", "--ram_gib=1", "--max_queue=1000", "--served_name=tiny"]
    with served(folder / "tiny", folder, *flags) as found:
        yield found


def tiny_server(folder: Path) -> Any:
    """A server over a tiny model in this process."""
    from outcore.serve import ServeSettings
    from tests.infer.models import save_tiny_model
    from tests.serve.conftest import Running

    save_tiny_model(folder / "tiny")
    settings = ServeSettings(logs=folder / "logs", name="tiny", max_queue=1000)
    return Running(folder / "tiny", settings, max_sequences=64)


def beside_slow(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Rounds alone and beside slow clients by turns."""
    where = urlparse(url)
    host, port = where.hostname or "127.0.0.1", where.port or 80
    asked = (host, port, args.model, args.streams)
    asyncio.run(run(*asked, args.seconds / args.rounds / 2))
    alone, slowed = [], []
    for _ in range(args.rounds):
        alone.append(asyncio.run(run(*asked, args.seconds / args.rounds / 2)))
        with beside(args.slow, host, port):
            slowed.append(asyncio.run(run(*asked, args.seconds / args.rounds / 2)))
    errors = [error for tally in alone + slowed for error in tally.errors]
    answers = [sum(tally.answers for tally in tallies) for tallies in (alone, slowed)]
    told = {"streams": args.streams, "slow": args.slow, "rounds": args.rounds, "answers_alone_and_beside": answers}
    return told | {"errors": len(errors), "first_errors": sorted(set(errors))[:5]} | compare(alone, slowed)


def main() -> int:
    """Run, print one JSON line; exit code 1 for errors, a starved stream or a leak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--slow", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.slow:
        with tempfile.TemporaryDirectory() as folder, address(args.url, Path(folder)) as url:
            found = beside_slow(args, url)
        print(json.dumps(found))
        return 1 if found["errors"] else 0
    with tempfile.TemporaryDirectory() as folder:
        server = None if args.url else tiny_server(Path(folder))
        where = urlparse(args.url if server is None else server.url)
        host, port = where.hostname or "127.0.0.1", where.port or 80
        asyncio.run(run(host, port, args.model, args.streams, min(20.0, args.seconds / 5)))
        process = psutil.Process()
        before = process.memory_info().rss
        tally = asyncio.run(run(host, port, args.model, args.streams, args.seconds))
        after = process.memory_info().rss
        left = None
        if server is not None:
            until = time.perf_counter() + 30
            while server.service.num_under_way and time.perf_counter() < until:
                time.sleep(0.05)
            left = server.service.num_under_way
            server.stop()
    served = [tally.per_stream.get(number, 0) for number in range(1, args.streams + 1)]
    found = {
        "streams": args.streams,
        "seconds": args.seconds,
        "answers": tally.answers,
        "left_in_the_middle": tally.left_early,
        "chunks_per_s": tally.tokens / args.seconds,
        "errors": len(tally.errors),
        "first_errors": sorted(set(tally.errors))[:5],
        "answers_of_the_stream_with_fewest": min(served),
        "answers_of_the_stream_with_most": max(served),
        "first_word_s": {"median": statistics.median(tally.first_s or [0]), "worst": max(tally.first_s or [0])},
        "places_not_given_back": left,
        "rss_growth": None if server is None else after / before - 1,
    }
    print(json.dumps(found))
    is_bad = tally.errors or min(served) == 0 or left or (server is not None and after > 1.05 * before)
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
