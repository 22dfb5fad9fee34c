"""Whole runs under faults and kills: save, rotation, export, caches, scratch, resume; by either engine, on the CPU.

    python -m tests.faults.runs matrix --engine stream --jobs 16 --out matrix.json
    python -m tests.faults.runs kills --engine stream --count 1000 --jobs 16 --out kills.json

`matrix`: each cell is a run under one fault, judged, then a start without it. `kills`: runs are killed at drawn system
calls again and again, also while they resume, then finished; none may lose what it announced, and all must end with the
weights of a run that nothing happened to. Exit code 1 when a cell is silent, a trace, without a path, lost or hangs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.engine.stream.runs.job import same, states
from tests.faults.kit import STEPS, Fault, Server, World, announced, build_library

GOOD = ("went on", "told", "dead")
PLACES = {
    "save": ("step-0000000", ("write", "fsync", "open", "rename", "mkdir")),
    "rotate": (".step-0000000", ("unlink", "rmdir", "rename")),
    "export": ("/export/", ("write", "fsync", "open", "rename", "mkdir")),
    "cache": ("/cache/", ("write", "fsync", "open", "rename", "read")),
    "metrics": ("metrics.jsonl", ("write", "fsync", "open")),
    "scratch": ("tensors.bin", ("write", "read", "open", "space")),
}
"""Phase -> what its paths contain, and the calls that it makes there."""
KINDS = {
    "write": ("5", "28", "30", "short", "kill"),
    "read": ("5", "flip", "short", "kill"),
    "open": ("5", "13", "24", "kill"),
    "fsync": ("5", "28", "kill"),
    "rename": ("5", "13", "kill", "killed"),
    "mkdir": ("28", "30"),
    "unlink": ("5", "kill"),
    "rmdir": ("5", "kill"),
    "space": ("28", "122"),
}
SCRATCH_KINDS = ("lost", "torn")
"""Writes that a drive claims to have done; only scratch can tell, checkpoints are read back when they are used."""
MOST_NTH = 40
"""Kills fall on one of so many first calls of a kind."""


def cells() -> list[tuple[str, Fault]]:
    """(phase, fault) of the matrix; each fault at the first call of its kind and at a later one."""
    found = []
    for phase, (path, calls) in PLACES.items():
        for call in calls:
            kinds = KINDS[call] + (SCRATCH_KINDS if phase == "scratch" and call == "write" else ())
            found += [(phase, Fault(call, kind, path, nth)) for kind in kinds for nth in (1, 4)]
    return found


class Workers:
    """A world (server, straight run) for each thread, made when it is first needed."""

    def __init__(self, engine: str, root: Path, jobs: int) -> None:
        self._engine, self._root = engine, root
        self._library = build_library(root)
        self._local = threading.local()
        self._servers: list[Server] = []
        self.pool = ThreadPoolExecutor(jobs)

    def world(self) -> World:
        if not hasattr(self._local, "world"):
            folder = Path(tempfile.mkdtemp(dir=self._root))
            running = Server(self._library)
            self._servers.append(running)
            self._local.world = World(running, folder, self._engine)
        return self._local.world

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        for running in self._servers:
            running.close()


def one_cell(workers: Workers, number: int, phase: str, fault: Fault) -> str:
    world = workers.world()
    root = world.root / f"cell{number}"
    cache = root / "cache" if phase == "cache" else None  # else it is there already and nothing is written
    word = world.verdict(root, fault, cache=cache)
    if word in GOOD:
        shutil.rmtree(root, ignore_errors=True)
    return word


def one_life(workers: Workers, number: int, kills: int) -> tuple[int, str]:
    """A run that is killed up to `kills` times and then finished: (kills that fell, verdict)."""
    world, draw = workers.world(), random.Random(number)
    root = world.root / f"life{number}"
    cache, fell = root / "cache", 0
    for _ in range(kills):
        before = announced(root)
        path, calls = PLACES[draw.choice(list(PLACES))]
        fault = Fault(draw.choice(calls), draw.choice(("kill", "killed")), path, draw.randint(1, MOST_NTH))
        ended = world.run(root, fault, cache=cache)
        if ended.code == 0:
            break  # it came through before the blow
        if ended.code != -9:
            return fell, f"ended with {ended.code} after {fault}: {ended.said[-600:]}"
        fell += 1
        if announced(root) < before:
            return fell, f"lost: step {before} was announced, {announced(root)} is left after {fault}"
    verdict = "same"
    newest = announced(root)
    ended = world.run(root, cache=cache)
    if ended.code != 0:
        verdict = f"lost: the last start ended with {ended.code}: {ended.said[-600:]}"
    elif newest and f"step-{newest:08d} at step" not in ended.said:
        verdict = f"lost: step {newest} was announced: {ended.said[:800]}"
    elif not same(states(root / f"checkpoint/r/step-{STEPS:08d}"), world.expected):
        verdict = "silent: other weights"
    if verdict == "same":
        shutil.rmtree(root, ignore_errors=True)
    return fell, verdict


def matrix(workers: Workers, most: int | None, say: Callable[[str], None]) -> dict:
    todo = cells()
    if most is not None:
        todo = random.Random(0).sample(todo, min(most, len(todo)))
    asked = {(p, f): workers.pool.submit(one_cell, workers, i, p, f) for i, (p, f) in enumerate(todo)}
    counts: Counter[str] = Counter()
    bad = {}
    for (phase, fault), future in asked.items():
        word = future.result()
        counts[word.split(":")[0]] += 1
        if word not in GOOD:
            bad[f"{phase}: {fault}"] = word
            say(f"BAD {phase}: {fault}: {word}")
    return {"cells": len(todo), "counts": dict(counts), "bad": bad}


def kill_many(workers: Workers, count: int, say: Callable[[str], None]) -> dict:
    fell, number, bad = 0, 0, {}
    while fell < count and number < 20 * count:
        batch = [workers.pool.submit(one_life, workers, number + i, 5) for i in range(max(1, min(64, count - fell)))]
        for i, future in enumerate(batch):
            kills, verdict = future.result()
            fell += kills
            if verdict != "same":
                bad[f"life {number + i}"] = verdict
                say(f"BAD life {number + i}: {verdict}")
        number += len(batch)
        say(f"{fell} kills in {number} lives, {len(bad)} bad")
    return {"kills": fell, "lives": number, "bad": bad}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.runs", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("matrix", "kills"))
    parser.add_argument("--engine", choices=("stream", "deepspeed"), default="stream")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each takes about 1.5 GB of RAM and a core")
    parser.add_argument("--count", type=int, help="kills (default 1000), or a drawn part of the matrix")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    root = Path(tempfile.mkdtemp(prefix="outcore-faults-"))
    began_s = time.monotonic()
    workers = Workers(args.engine, root, args.jobs)
    try:
        found = (
            matrix(workers, args.count, lambda words: print(words, flush=True))
            if args.what == "matrix"
            else kill_many(workers, args.count or 1000, lambda words: print(words, flush=True))
        )
    finally:
        workers.close()
    found |= {"what": args.what, "engine": args.engine, "seconds": round(time.monotonic() - began_s)}
    print(json.dumps({key: value for key, value in found.items() if key != "bad"}))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if not found["bad"]:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if found["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
