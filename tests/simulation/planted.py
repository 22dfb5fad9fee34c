"""Bugs planted in the product, in memory: a statement dropped or a text changed, and what the simulator makes of each.

Every statement of `FILES` that is a bare call of `DROPPED` (a wait, a sync, a slot given back, a listener told) is left
out once; `CHANGED` are texts that become others (a condition, an order, an index). Only lines that the
worlds reach are planted: the simulator says nothing of others. Each bug runs in a process of its own, forked from one
that has imported everything: the functions of its file get the code of the changed source."""

from __future__ import annotations

import ast
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import outcore
from tests.simulation.planted_texts import CHANGED, DROPPED, FILES, HARMLESS
from tests.simulation.run import run_seed, seed_of

PACKAGE = Path(outcore.__file__).parent
MOST_SEEDS = 1000
MOST_BUGS = 200
SURVEY_SEEDS = 20
"""Seeds of a world that tell which lines it reaches."""


@dataclass(frozen=True)
class Bug:
    """One change of one file."""

    world: str
    file: str
    line: int
    words: str
    tree: ast.Module

    def plant(self, functions: Mapping[str, list[FunctionType]]) -> None:
        """Give the file's functions the changed code. `functions`: by the path of their file."""
        path = str(PACKAGE / self.file)
        new = {(c.co_qualname, c.co_firstlineno): c for c in _codes(compile(self.tree, path, "exec"))}
        for function in functions[path]:
            code = function.__code__
            key = (code.co_qualname, code.co_firstlineno)
            if key in new and len(new[key].co_freevars) == len(code.co_freevars):
                function.__code__ = new[key]


def functions_by_file() -> dict[str, list[FunctionType]]:
    """Every function there is, by the path of its file."""
    found: dict[str, list[FunctionType]] = defaultdict(list)
    gc.unfreeze()  # what a test run has set aside is not listed
    for one in gc.get_objects():
        if type(one) is FunctionType:
            found[one.__code__.co_filename].append(one)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def bugs(reached: dict[str, set[tuple[str, int]]]) -> list[Bug]:
    """All of them, in lines that their worlds reach."""
    found = []
    for file, world in FILES.items():
        source = (PACKAGE / file).read_text()
        lines = reached[world]
        for statement in _statements(ast.parse(source)):
            words = ast.unparse(statement)
            if (file, statement.lineno) in lines and not any(harmless in words for harmless in HARMLESS):
                found.append(Bug(world, file, statement.lineno, f"without {words}", _without(source, statement)))
        for old, new in CHANGED.get(file, ()):
            assert source.count(old) == 1, f"{file} has {source.count(old)} times {old!r}"
            line = source[: source.index(old)].count("\n") + 1
            found.append(
                Bug(world, file, line, f"{old.strip()!r} -> {new.strip()!r}", ast.parse(source.replace(old, new)))
            )
    return found


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                    name = node.value.func
                    if (name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")) in DROPPED:
                        yield node


def _without(source: str, statement: ast.stmt) -> ast.Module:
    class Drop(ast.NodeTransformer):
        def generic_visit(self, node: ast.AST) -> ast.AST:
            if isinstance(node, type(statement)) and (node.lineno, node.col_offset) == place:
                return ast.copy_location(ast.Pass(), node)
            return super().generic_visit(node)

    place = statement.lineno, statement.col_offset
    return ast.fix_missing_locations(Drop().visit(ast.parse(source)))


def survey(worlds: Iterable[str]) -> dict[str, set[tuple[str, int]]]:
    """Lines of the product that each world reaches: (file below the package, line)."""
    found: dict[str, set[tuple[str, int]]] = {}
    for world in worlds:
        seen: set[tuple[str, int]] = set()
        for seed in range(SURVEY_SEEDS):
            run_seed(seed_of(world, seed), seen=seen)
        prefix = f"{PACKAGE}{os.sep}"
        found[world] = {(file.removeprefix(prefix), line) for file, line in seen}
    return found


@dataclass
class Verdict:
    """What became of one bug."""

    bug: Bug
    seeds: int = 0
    seed: int | None = None
    how: str = ""


def try_bug(bug: Bug, functions: Mapping[str, list[FunctionType]], seconds: float) -> Verdict:
    """Run seeds with it, in a forked process, until one fails."""
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(read)

        def tell(seeds: int, seed: int | None, how: str) -> None:
            os.write(write, json.dumps([seeds, seed, how]).encode())
            os._exit(0)

        try:
            bug.plant(functions)
            began, number = time.monotonic(), 0
            for number in range(MOST_SEEDS):
                seed = seed_of(bug.world, number)
                signal.signal(signal.SIGALRM, lambda *of, n=number + 1, seed=seed: tell(n, seed, "spins for ever"))
                signal.alarm(40)
                error = run_seed(seed).error
                signal.alarm(0)
                if error is not None:
                    tell(number + 1, seed, f"{type(error).__name__}: {str(error)[:90]}")
                if time.monotonic() - began > seconds:
                    break
            tell(number + 1, None, "")
        except BaseException as error:
            tell(0, None, f"not planted: {error!r}")
    os.close(write)
    with os.fdopen(read) as told:
        seeds, seed, how = json.loads(told.read() or '[0, 0, "the process died"]')
    os.waitpid(child, 0)
    if seed is not None and (error := run_seed(seed).error) is not None:
        raise AssertionError(f"seed {seed} fails without the bug") from error
    return Verdict(bug, seeds, seed, how)


def main(seconds: float, words: str) -> int:
    """Try all whose text holds `words`; a table, then the count and those that were missed."""
    print(
        f"seeds without bugs first, in {tempfile.gettempdir()}; {seconds:g} s or {MOST_SEEDS} seeds a bug", flush=True
    )
    found = [bug for bug in bugs(survey(sorted(set(FILES.values())))) if words in f"{bug.file}: {bug.words}"]
    if len(found) > MOST_BUGS:  # spread over all
        found = [found[place * len(found) // MOST_BUGS] for place in range(MOST_BUGS)]
    functions, missed = functions_by_file(), []
    gc.freeze()  # a seed's end then looks at what that seed made
    for number, bug in enumerate(found, 1):
        verdict = try_bug(bug, functions, seconds)
        text = (
            f"{verdict.seeds}. seed, {verdict.seed}: {verdict.how}"
            if verdict.seed is not None
            else f"MISSED in {verdict.seeds} seeds"
        )
        print(f"{number}/{len(found)} {bug.file}:{bug.line} {bug.words[:90]!r} | {text}", flush=True)
        if verdict.seed is None:
            missed.append(bug)
    rooms = Counter(str(Path(bug.file).parent) for bug in found)
    for room, count in rooms.items():
        print(f"{room}: {count - sum(str(Path(bug.file).parent) == room for bug in missed)} of {count}")
    print(f"\n{len(found) - len(missed)} of {len(found)} planted bugs found ({1 - len(missed) / len(found):.1%})")
    return 0
