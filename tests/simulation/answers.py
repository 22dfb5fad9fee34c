"""World of answers: clients ask, cancel and wait while passes run, fail and run out of pages, and processes die.

The real engine, its thread, scheduler, page cache, prefixes and their copies on a drive. The model is a toy that reads
every token back from its page before it says the next one, so a page that is swapped, freed or written too early is
another answer than the plain one."""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch

from outcore.infer import Answer, EngineThread, InferenceEngine, Piece, Request, Sampling, Speech
from outcore.infer.cache import (
    CacheSettings,
    DriveMemory,
    GroupPlan,
    KeptPrefixes,
    KvCache,
    KvShape,
    PassTables,
    Span,
)
from outcore.infer.schedule import ScheduleLimits, Scheduler, Work
from outcore.staging.pool import SmallCopies
from outcore.storage import TensorSpec, TensorStore
from tests.simulation.drive import Drive, Faults
from tests.simulation.threads import Simulation

VOCABULARY, END, WINDOW, PAGE_TOKENS = 40, 0, 6, 4
CPU = torch.device("cpu")
SHAPE = KvShape(1, 2, 1)
PATIENCE_S, LATE_S, PROMPT_S = 20_000.0, 4.0, 0.1


def following(tokens: list[int]) -> int:
    """The toy's next token: often it repeats what stood before, so that guesses come true."""
    numbers = [token * 1000 + place for place, token in enumerate(tokens)]
    return _next(numbers, numbers[-WINDOW:])


def _next(numbers: list[int], seen: list[int]) -> int:
    mixed = zlib.crc32(repr(numbers).encode()) ^ zlib.crc32(repr(seen).encode())
    return numbers[-6] // 1000 if mixed % 3 and len(numbers) > 6 else mixed % VOCABULARY


def plain_answer(request: Request) -> list[int]:
    """What the toy says to a prompt when nothing else happens."""
    tokens = list(request.prompt)
    for _ in range(request.sampling.max_tokens):
        tokens.append(following(tokens))
        if tokens[-1] == END:
            break
    return tokens[len(request.prompt) :]


class Failure(RuntimeError):
    """A pass that found no memory."""


class Toy:
    """A `PassRunner`: keys hold a token and its place, in one group of layers that sees all and one with a window."""

    can_step_back, is_usual = True, True

    def __init__(self, simulation: Simulation, cache: KvCache, failing: float, limits: ScheduleLimits) -> None:
        self.simulation, self.cache, self.failing, self.limits = simulation, cache, failing, limits
        self.copies = SmallCopies(CPU)
        self.failed, self.passes = 0, 0
        self.cancelled: dict[str, int] = {}
        """Requests that were cancelled, and in which pass: the one after the next has nothing of them."""
        self.lost: set[str] = set()
        """Requests of passes that failed."""

    def run(self, works: list[Work]) -> list[tuple[Work, torch.Tensor]]:
        pick, row, spans = self.simulation.random, 0, []
        self.passes += 1
        names = {work.sequence.request.name for work in works}
        ended = [name for name in names if self.passes - self.cancelled.get(name, self.passes) > 1]
        assert not ended and not names & self.lost, "a pass of a request that was cancelled, or whose pass failed"
        most = self.limits.pass_tokens + self.limits.chunk_tokens  # one chunk always goes
        assert sum(work.count for work in works) <= most, "a pass is larger than was asked"
        self.simulation.sleep(pick.choice([0.001, 0.02, 0.3]))
        self._may_fail(names)
        for work in works:
            spans.append(Span(work.pages, work.start, work.count, row))
            row += work.count
        tables = PassTables(spans, PAGE_TOKENS, self.copies)
        tokens = [token for work in works for token in work.tokens]
        places = [span.start + i for span in spans for i in range(span.count)]
        keys = torch.tensor([tokens, places], dtype=torch.float32).T.unsqueeze(1)
        for group in (0, 1):
            store = self.cache.store((group, 0), SHAPE, group)
            store.write(keys, keys[..., :1] + 1, tables.slots_of(group, CPU))
        self._may_fail(names)
        found = []
        for work, span in zip(works, spans, strict=True):
            if work.num_wanted:
                ends = range(span.length - work.num_wanted + 1, span.length + 1)
                found.append((work, torch.stack([self._logits(tables, span, end) for end in ends])))
        return found

    def _logits(self, tables: PassTables, span: Span, end: int) -> torch.Tensor:
        seen = [self._numbers(tables, span, 0, 0, end), self._numbers(tables, span, 1, max(0, end - WINDOW), end)]
        logits = torch.zeros(VOCABULARY)
        logits[_next(*seen)] = 9.0
        return logits

    def _numbers(self, tables: PassTables, span: Span, group: int, start: int, end: int) -> list[int]:
        first, last = start // PAGE_TOKENS, -(-end // PAGE_TOKENS)
        store = self.cache.stores[group, 0]
        pages = tables.pages_of(span, group, first, last, CPU)
        store.read_ahead(pages)
        keys, values = store.read(pages, CPU)
        keys, values = (of[start - first * PAGE_TOKENS : end - first * PAGE_TOKENS, 0] for of in (keys, values))
        assert bool((values[:, 0] == keys[:, 0] + 1).all()), "keys and values are not of the same tokens"
        return [int(token) * 1000 + int(place) for token, place in keys.tolist()]

    def _may_fail(self, names: set[str]) -> None:
        if self.simulation.chance(self.failing):
            self.failed += 1
            self.lost |= names
            raise Failure("out of memory: simulated")

    def close(self) -> None:
        return


class _Words:
    """A tokenizer with a word for each token."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<{token}>" for token in tokens)


class _Scratch:
    """Stores on the simulated drive."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: list[TensorStore] = []

    def store(self, name: str, specs: list[TensorSpec]) -> TensorStore:
        self.made.append(TensorStore.create([self.root / name], specs))
        return self.made[-1]


class Asked:
    """A request, and what came back."""

    def __init__(self, request: Request, simulation: Simulation) -> None:
        self.request, self._simulation, self._asked_s = request, simulation, simulation.now_s
        self.answers: dict[int, Answer] = {}
        self.pieces: dict[int, list[Piece]] = {}
        self.is_cancelled = self.is_submitted = False

    @property
    def is_over(self) -> bool:
        return len(self.answers) == self.request.n

    def on_piece(self, piece: Piece) -> None:
        told = self.pieces.setdefault(piece.choice, [])
        assert piece.choice not in self.answers, "a piece of an answer that has ended"
        assert not told or told[-1].finish is None, "a piece behind the last one"
        told.append(piece)

    def on_answer(self, answer: Answer) -> None:
        assert answer.choice not in self.answers, f"{answer.request} was answered twice"
        took_s, limit_s = self._simulation.now_s - self._asked_s, self.request.deadline_s
        assert limit_s is None or took_s < limit_s + LATE_S, f"{answer.request} took {took_s} s of {limit_s}"
        self.answers[answer.choice] = answer


class Answers:
    """One process after another with an engine, over one drive."""

    def __init__(self, simulation: Simulation, drive: Drive) -> None:
        pick = simulation.random
        self.simulation, self.drive = simulation, drive
        self.failing = pick.choice([0, 0, 0, 0.03])
        self.keeps = pick.random() < 0.4
        self.on_drive = pick.random() < 0.2
        drive.faults = Faults(short=pick.choice([0, 50]), slow_s=pick.choice([0, 0.05]))
        if self.keeps and not self.on_drive:
            drive.faults.error = pick.choice([0, 0, 10])
            drive.faults.lost_write, drive.faults.torn_write = pick.choice([(0, 0), (60, 60)])
            drive.faults.only = "records.bin"
        self.beginnings = [[pick.randrange(1, VOCABULARY) for _ in range(pick.randint(3, 22))] for _ in range(2)]
        self.pages, self.budget_pages = pick.randint(12, 24), pick.randint(2, 12)
        self.number = 0

    def run(self) -> None:
        """Live once, or twice where something is kept."""
        simulation, pick = self.simulation, self.simulation.random
        lives = 2 if self.keeps else 1
        for life in range(lives):
            if life + 1 < lives and pick.random() < 0.6:
                self.drive.kill_at, self.drive.cuts_power = pick.randint(1, 150), pick.random() < 0.5
            task = simulation.start(self._life, f"life {life}")
            simulation.block(lambda task=task: task.is_over)
            for process in self.drive.processes:
                self.drive.end_process(process)
            self.drive.kill_at = None
            if self.drive.is_cut:
                self.drive.cut_power()
            self.drive.is_full = False
            if simulation.failures:
                raise simulation.failures[0]

    def _life(self) -> None:
        simulation, pick = self.simulation, self.simulation.random
        self.drive.process()
        scratch = _Scratch(self.drive.root)
        cache = self._cache(scratch)
        limits = ScheduleLimits(
            max_sequences=pick.randint(1, 6),
            pass_tokens=pick.choice([8, 16, 24]),
            chunk_tokens=8,
            draft_tokens=pick.choice([0, 6]),
            whole_chunks=pick.random() < 0.3,
            is_deterministic=pick.random() < 0.3,
        )
        toy = Toy(simulation, cache, self.failing, limits)
        engine = InferenceEngine(
            cast(Any, toy), Scheduler(cache, limits), Speech(_Words(), frozenset([END]), VOCABULARY, None),
            clock=lambda: simulation.now_s,
        )  # fmt: skip
        thread = EngineThread(engine)
        thread.start()
        asked: list[Asked] = []
        clients = [
            simulation.start(lambda: self._client(engine, thread, asked), f"client {n}")
            for n in range(pick.randint(1, 3))
        ]
        stops_early = pick.random() < 0.15
        simulation.block(lambda: all(task.is_over for task in clients), 1.0 if stops_early else PATIENCE_S)
        before = [one for one in asked if one.is_submitted]
        assert thread.stop(PATIENCE_S), "the engine's thread does not end"
        assert all(one.is_over for one in before), "the engine's thread has ended, and somebody was not answered"
        assert stops_early or all(task.is_over for task in clients), "a client waits for ever"
        engine.close()
        for task in clients:
            simulation.block(lambda task=task: task.is_over, PATIENCE_S)
        may_fail = bool(toy.failed or (self.on_drive and self.drive.struck))
        for one in asked:
            self._check(one, may_fail=may_fail, may_stop=stops_early)
        assert engine.scheduler.is_idle, "an answer that has ended holds its place"
        cache.close_kept()
        cache.clear_prefixes()
        assert not any(cache.used_pages), f"nobody is left and pages are in use: {cache.used_pages}"
        for store in scratch.made:
            store.delete()

    def _cache(self, scratch: _Scratch) -> KvCache:
        settings = CacheSettings(
            (GroupPlan(None, self.pages), GroupPlan(WINDOW, self.pages)), PAGE_TOKENS, torch.float32
        )
        kept = None
        if self.keeps:
            page_bytes = 2 * PAGE_TOKENS * SHAPE.token_bytes(torch.float32, "same")
            with suppress(ValueError):  # the drive may refuse: then nothing is kept
                kept = KeptPrefixes(
                    self.drive.root / "kept", self.budget_pages * 8192, {"model": "toy"}, PAGE_TOKENS, page_bytes
                )
            assert kept is not None or self.drive.struck, "the folder of prefixes is refused though the drive is well"
        memory = DriveMemory(cast(Any, scratch), 2) if self.on_drive else None
        cache = KvCache(settings, memory, kept)
        cache.make_stores({None: {0: SHAPE}, WINDOW: {1: SHAPE}})
        return cache

    def _client(self, engine: InferenceEngine, thread: EngineThread, asked: list[Asked]) -> None:
        simulation, pick = self.simulation, self.simulation.random
        for _ in range(pick.randint(1, 4)):
            mine = []
            for _ in range(pick.randint(1, 3)):
                self.number, name = self.number + 1, f"r{self.number}"
                beginning = pick.choice(self.beginnings)[: pick.randint(0, 22)]
                prompt = [*beginning, *(pick.randrange(1, VOCABULARY) for _ in range(pick.randint(1, 9)))]
                room = engine.max_tokens - len(prompt)
                sampling = Sampling(temperature=0, max_tokens=pick.randint(1, min(room, 20)))
                deadline_s = pick.choice([None] * 6 + [0.5])
                one = Asked(
                    Request(
                        name, tuple(prompt), sampling, n=pick.choice([1, 1, 1, 2]),
                        priority=pick.choice([0, 0, 1, -1]), deadline_s=deadline_s,
                    ),
                    simulation,
                )  # fmt: skip
                asked.append(one)
                mine.append(one)
                engine.submit(one.request, one.on_piece, one.on_answer)
                one.is_submitted = True
            if pick.random() < 0.25:
                simulation.sleep(pick.random())
                mine[0].is_cancelled = True
                engine.cancel(mine[0].request.name)
                cast(Toy, engine.runner).cancelled[mine[0].request.name] = cast(Toy, engine.runner).passes
            if pick.random() < 0.2:
                for one in mine:
                    one.is_cancelled = True  # by the end of the thread, should that come first
            else:
                for one in mine:
                    is_over = simulation.block(lambda one=one: one.is_over or not thread._thread.is_alive(), PATIENCE_S)
                    assert is_over, f"{one.request.name} is not answered"
            if all(one.is_over for one in asked) and thread._thread.is_alive():
                simulation.sleep(PROMPT_S)
                notes: list[bool] = []
                engine.call_soon(lambda notes=notes: notes.append(True))
                is_idle = all(one.is_over for one in asked)
                was_told = simulation.block(lambda notes=notes: bool(notes), PROMPT_S)
                assert was_told or not is_idle or thread._stopping.is_set(), "an idle engine is not woken"

    def _check(self, one: Asked, *, may_fail: bool, may_stop: bool) -> None:
        plain, request = plain_answer(one.request), one.request
        assert one.is_over or may_stop, f"{request.name}: {len(one.answers)} of {request.n} answers came"
        for choice, answer in one.answers.items():
            tokens = [chosen.token for chosen in answer.tokens]
            told = [chosen.token for piece in one.pieces[choice] for chosen in piece.tokens]
            assert told == tokens, f"{request.name}: pieces say {told}, the answer {tokens}"
            assert "".join(piece.text for piece in one.pieces[choice]) == answer.text
            assert answer.finish == "error" or answer.text == _Words().decode([t for t in tokens if t != END]), (
                answer.text
            )
            if answer.finish in ("stop", "length"):
                assert tokens == plain, f"{request.name}: {tokens} instead of {plain}"
            assert tokens == plain[: len(tokens)], f"{request.name}: {tokens} does not begin {plain}"
            if answer.finish == "cancelled":
                assert one.is_cancelled or may_stop, f"{request.name} was cancelled by nobody"
            if answer.finish == "error":
                is_late = request.deadline_s is not None and "not finished" in answer.error
                assert may_fail or is_late, f"{request.name}: {answer.error}"


def world(simulation: Simulation, drive: Drive) -> None:
    """Run it."""
    Answers(simulation, drive).run()
