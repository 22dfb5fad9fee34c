"""Whole runs under faults and kills: save, rotation, export, caches, scratch, resume; by either engine, on the CPU.

    python -m tests.faults.runs matrix --engine stream --jobs 16 --out matrix.json
    python -m tests.faults.runs kills --engine stream --count 1000 --jobs 16 --out kills.json
    python -m tests.faults.runs kills --engine phases --out kills-phases.json

`matrix`: each cell is a run under one fault, judged, then a start without it. `kills`: runs are killed at drawn system
calls again and again, also while they resume, then finished; none may lose what it announced, and all must end with the
weights of a run that nothing happened to. With `phases`, saves, rotation, resumes, exports, caches, metrics and scratch
alone (`phases.py`) are killed before and after every system call that they make below their folder. Exit code 1 when a
cell is silent, a trace, without a path, lost or hangs.
"""

import argparse
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, as_completed, wait
from contextlib import closing
from pathlib import Path

from outcore.common.listing import damaged_weights
from tests.engine.stream.runs.job import same, states
from tests.faults.kit import STEPS, Fault, Server, World, announced, build_library
from tests.faults.phases import PHASES

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
    "write": ("5", "28", "30", "short", "kill"), "read": ("5", "flip", "short", "kill"),
    "open": ("5", "13", "24", "kill"), "fsync": ("5", "28", "kill"), "rename": ("5", "13", "kill", "killed"),
    "mkdir": ("28", "30"), "unlink": ("5", "kill"), "rmdir": ("5", "kill"), "space": ("28", "122"),
}  # fmt: skip
SCRATCH_KINDS = ("lost", "torn")
"""Writes that a drive claims to have done; only scratch can tell, checkpoints are read back when they are used."""
KILL_PLACES = {
    "save": ("any", "step-0000000"), "rotate": ("unlink", "step-0000000"), "export": ("any", "/export/"),
    "cache": ("any", "/cache/"), "metrics": ("any", "metrics.jsonl"), "scratch": ("any", "tensors.bin"),
    "whole run": ("any", "/life"),
}  # fmt: skip
"""Phase -> which calls on which paths a kill falls before or after; resumes read what saves have written."""
MOST_KILLS = 8
"""In one life."""


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
        self._counting = threading.Lock()
        self._calls: dict[str, int] = {}
        self.jobs = jobs
        self.pool = ThreadPoolExecutor(jobs)

    def world(self) -> World:
        if not hasattr(self._local, "world"):
            folder = Path(tempfile.mkdtemp(dir=self._root))
            running = Server(self._library)
            self._servers.append(running)
            self._local.world = World(running, folder, self._engine)
        return self._local.world

    def calls(self) -> dict[str, int]:
        """How many system calls a whole run makes in each of `KILL_PLACES`, counted once."""
        world = self.world()
        with self._counting:
            for phase, (call, path) in KILL_PLACES.items():
                if phase not in self._calls:
                    root, told = world.root / f"life-{phase}", world.root / "count"
                    ended = world.run(root, Fault(call, "kill", path, 1 << 30), cache=root / "cache", count=told)
                    assert ended.code == 0, ended.said
                    self._calls[phase] = int(told.read_text())
        return self._calls

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


def one_life(workers: Workers, number: int) -> tuple[Counter[str], str]:
    """A run that is killed up to `MOST_KILLS` times, and then comes to its end: (kills by phase, verdict)."""
    world, draw, calls = workers.world(), random.Random(number), workers.calls()
    root = world.root / f"life{number}"
    fell: Counter[str] = Counter()
    while True:
        newest, fault, phase = announced(root), None, ""
        if fell.total() < MOST_KILLS:
            phase = draw.choice([name for name in KILL_PLACES if name != "cache" or not fell])
            left = calls[phase] * (STEPS + 1 - newest) // (STEPS + 1)  # a resumed run makes fewer
            call, path = KILL_PLACES[phase]
            fault = Fault(call, draw.choice(("kill", "killed")), path, draw.randint(1, max(1, left)))
        ended = world.run(root, fault, cache=root / "cache")
        resumed = re.search(r"resumed from .*step-(\d+) at step", ended.said)
        if newest and resumed and int(resumed[1]) != newest:
            return fell, f"lost: step {newest} was announced: {ended.said[:800]}"
        if ended.code != -9:
            break
        fell[phase] += 1
        if announced(root) < newest:
            return fell, f"lost: step {newest} was announced, {announced(root)} is left after {fault}"
    if ended.code != 0:
        return fell, f"lost: the last start ended with {ended.code} ({fault}): {ended.said[-600:]}"
    if newest and not resumed:
        return fell, f"lost: step {newest} was announced: {ended.said[:800]}"
    if not same(states(root / f"checkpoint/r/step-{STEPS:08d}"), world.expected):
        return fell, "silent: other weights"
    if damaged_weights(root / "export/r") != ([], []):
        return fell, "silent: a damaged export"
    shutil.rmtree(root, ignore_errors=True)
    return fell, "same"


def matrix(workers: Workers, most: int | None, on_found: Callable[[str, dict], None]) -> dict:
    todo = cells()
    if most is not None:
        todo = random.Random(0).sample(todo, min(most, len(todo)))
    asked = {workers.pool.submit(one_cell, workers, i, p, f): (p, f) for i, (p, f) in enumerate(todo)}
    counts: Counter[str] = Counter()
    found = {"cells": len(todo), "done": 0, "counts": counts, "bad": {}}
    for future in as_completed(asked):
        (phase, fault), word = asked[future], future.result()
        counts[word.split(":")[0]] += 1
        found["done"] += 1
        if word not in GOOD:
            found["bad"][f"{phase}: {fault}"] = word
        on_found(f"{phase}: {fault}: {word}", found)
    return found


def kill_many(workers: Workers, count: int, on_found: Callable[[str, dict], None]) -> dict:
    phases: Counter[str] = Counter()
    found = {"kills": 0, "lives": 0, "by_phase": phases, "bad": {}}
    waiting, number = set(), 0
    while found["kills"] < count or waiting:
        while found["kills"] < count and len(waiting) < 2 * workers.jobs and number < 20 * count:
            waiting.add(workers.pool.submit(one_life, workers, number))
            number += 1
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            fell, verdict = future.result()
            phases += fell
            found["kills"], found["by_phase"], found["lives"] = phases.total(), phases, found["lives"] + 1
            if verdict != "same":
                found["bad"][f"life {found['lives']}"] = verdict
            on_found(f"{found['kills']} kills in {found['lives']} lives: {verdict}", found)
    return found


def kill_phases(library: Path, root: Path, on_found: Callable[[str, dict], None]) -> dict:
    """Kill each of `phases` before and after every one of its system calls, and look at what the next start finds."""
    phases: Counter[str] = Counter()
    found = {"kills": 0, "by_phase": phases, "bad": {}}
    with closing(Server(library)) as running:
        for name, phase in PHASES.items():
            calls = _phase_calls(running, root / "counted", name)
            for nth, kind in itertools.product(range(1, calls + 1), ("kill", "killed")):
                here = root / f"{name}-{nth}-{kind}"
                here.mkdir()
                phase.prepare(here)
                ended = running.phase(name, here, Fault("any", kind, str(here), nth))
                phases[name] += ended.code == -9
                found["kills"] = phases.total()
                try:
                    assert ended.code in (0, -9), ended.said
                    phase.check(here, ended.code == 0)
                    again = running.phase(name, here)
                    assert again.code == 0 or "exists already" in again.said, again.said
                    phase.check(here, True)
                except Exception as error:
                    found["bad"][f"{name}: {kind} {nth}"] = f"{type(error).__name__}: {error}: {ended.said[-600:]}"
                    continue
                shutil.rmtree(here, ignore_errors=True)
            on_found(f"{name}: {phases[name]} kills at {calls} system calls, {len(found['bad'])} bad so far", found)
    return found


def _phase_calls(running: Server, root: Path, name: str) -> int:
    """How many system calls a phase makes below its folder."""
    here, told = root / name, root / f"{name}.count"
    here.mkdir(parents=True)
    PHASES[name].prepare(here)
    ended = running.phase(name, here, Fault("any", "kill", str(here), 1 << 30), told)
    assert ended.code == 0, ended.said
    return int(told.read_text())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.runs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("matrix", "kills"))
    parser.add_argument("--engine", choices=("stream", "deepspeed", "phases"), default="stream")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each takes about 1.5 GB of RAM and a core")
    parser.add_argument("--count", type=int, help="kills (default 1000), or a drawn part of the matrix")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if (args.what, args.engine) == ("matrix", "phases"):
        parser.error("the matrix of phases is tests/faults/test_matrix.py")
    root = Path(tempfile.mkdtemp(prefix="outcore-faults-"))
    began_s = time.monotonic()

    def on_found(words: str, found: dict) -> None:
        """Say it, and keep all so far: a machine may die before the end."""
        print(words, flush=True)
        more = {"what": args.what, "engine": args.engine, "seconds": round(time.monotonic() - began_s)}
        if args.out is not None:
            args.out.write_text(json.dumps(found | more, indent=1), encoding="utf-8")

    if args.engine == "phases":
        found = kill_phases(build_library(root), root, on_found)
    else:
        with closing(Workers(args.engine, root, args.jobs)) as workers:
            found = (
                matrix(workers, args.count, on_found)
                if args.what == "matrix"
                else kill_many(workers, args.count or 1000, on_found)
            )
    if not found["bad"]:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if found["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
