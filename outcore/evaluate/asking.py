"""Questions to a model, each answered once whatever happens in between.

One thing a task wants to know of a model: how likely a continuation is, or what it writes.

Questions answered in portions that fit a pass, each noted before the next begins.

A portion is cut from the questions alone, never from what is known already: one that a kill left half-noted is asked
again whole, so the same rows meet in the same calls and the scores are the same to the last bit.

Answers as they come, by the content of their questions, so that a killed evaluation asks nothing twice.

The engine as what answers: owned here and stepped by who asks, or a server's, that steps by itself."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from outcore.common.journal import JournalHeld, JournalOfAnother, LineJournal
from outcore.evaluate.settings import EvaluationError
from outcore.infer import Answer, InferenceEngine, Request, Sampling
from outcore.infer.opening import OpenedModel
from outcore.infer.requests import sampling_of


@dataclass(frozen=True)
class ScoreQuestion:
    """Question how likely `continuation` is after `context`; the answer is [log-probability, whether each token is the
    likeliest]."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def key(self) -> str:
        return _key("score", [self.context, self.continuation])

    @property
    def num_tokens(self) -> int:
        return len(self.context) + len(self.continuation)


@dataclass(frozen=True)
class WriteQuestion:
    """Question what the model writes after `prompt`; the answer is the text."""

    prompt: tuple[int, ...]
    sampling: Mapping[str, Any] = field(hash=False)
    """Fields of `Sampling`."""
    repeat: int = 0
    """Which of several answers to the same prompt; they are drawn with different seeds."""

    @property
    def key(self) -> str:
        return _key("write", [self.prompt, dict(self.sampling), self.repeat])

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + int(self.sampling["max_tokens"])


Question = ScoreQuestion | WriteQuestion


def _key(kind: str, content: list[Any]) -> str:
    return hashlib.blake2b(json.dumps([kind, *content]).encode(), digest_size=16).hexdigest()


class AnswerJournal:
    """Answers that survive the process. `header`: what they depend on; `answers` has all that are known."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.answers: dict[str, Any] = {}
        try:
            self._lines = LineJournal(path, header, lambda place, entry: self.answers.update([entry]))
        except JournalHeld as error:
            raise EvaluationError(f"{error}: this evaluation runs already, in another process.") from None
        except JournalOfAnother:
            raise EvaluationError(
                f"{path} belongs to another model, placement, settings or version of outcore. Give --new to begin "
                "anew, or the same flags as before to go on."
            ) from None
        self.close, self.remove = self._lines.close, self._lines.remove

    def add(self, answers: Mapping[str, Any]) -> None:
        """Note answers by their questions' keys; they are on the drive when this returns. OSError."""
        self._lines.append(answers.items())
        self._lines.sync()
        self.answers.update(answers)


PORTION_TOKENS = {"cuda": 1 << 16, "cpu": 1 << 13}
"""Tokens of questions that go through all layers together before their answers are noted: a pass's worth on a GPU."""


class Cancelled(Exception):
    """Whoever asked does not want the answers any more."""


class Answerer(Protocol):
    """Protocol of a model that answers: an engine here, or one that a server runs."""

    def score(self, questions: Sequence[ScoreQuestion], check: Callable[[], None]) -> list[list[Any]]:
        """[log-probability, is likeliest] of each. `check` raises Cancelled when it is to end."""
        ...

    def write(
        self, questions: Sequence[WriteQuestion], told: Callable[[int, str], None], check: Callable[[], None]
    ) -> None:
        """Tell each text with its question's number, as they end."""
        ...


@dataclass(frozen=True)
class Progress:
    """Progress of a list of questions: `done` of `total` are answered."""

    stage: str
    done: int
    total: int
    newly: tuple[int, ...] = ()
    """Numbers of the questions whose answers came with this."""
    left_s: float | None = None


class Desk:
    """Desk at which the harness asks and a model answers."""

    def __init__(
        self,
        answerer: Answerer,
        journal: AnswerJournal | None,
        portion_tokens: int,
        tell: Callable[[Progress], None] = lambda progress: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.answerer, self.portion_tokens = answerer, portion_tokens
        self.tell, self.check = tell, check
        self.asking_s = 0.0
        """Seconds in which the model was asked."""
        self.asked = 0
        """Questions that it answered; what the journal knew is not among them."""
        self._journal = journal
        self._known: dict[str, Any] = {} if journal is None else journal.answers

    def ask(self, questions: Sequence[Question]) -> list[Any]:
        """An answer for each, in order. Cancelled, or what the engine raises."""
        keys = [question.key for question in questions]
        first: dict[str, int] = {}
        for number, key in enumerate(keys):
            first.setdefault(key, number)
        unique = [questions[number] for number in first.values()]
        counter = _Counter(keys, self.tell)
        written = {question.key for question in unique if isinstance(question, WriteQuestion)}  # scores: by portions
        counter.add(written & self._known.keys(), "")
        for stage, kind, answer in (("scoring", ScoreQuestion, self._score), ("writing", WriteQuestion, self._write)):
            of_kind = [question for question in unique if isinstance(question, kind)]
            for portion in self._portions(of_kind):
                self.check()
                if all(question.key in self._known for question in portion):
                    counter.add({question.key for question in portion}, stage)
                    continue
                began_s = time.monotonic()
                answer(portion, counter, stage)
                self.asking_s += time.monotonic() - began_s
        return [self._known[key] for key in keys]

    def _portions(self, questions: Sequence[Any]) -> list[list[Any]]:
        if questions and isinstance(questions[0], WriteQuestion):  # each is noted by itself, as it ends
            return [list(questions)]
        found: list[list[Any]] = []
        tokens = 0
        for question in questions:
            if not found or tokens + question.num_tokens > self.portion_tokens:
                found.append([])
                tokens = 0
            found[-1].append(question)
            tokens += question.num_tokens
        return found

    def _score(self, portion: list[Any], counter: _Counter, stage: str) -> None:
        answers = self.answerer.score(portion, self.check)
        self._note({question.key: answer for question, answer in zip(portion, answers, strict=True)}, counter, stage)

    def _write(self, portion: list[Any], counter: _Counter, stage: str) -> None:
        left = [question for question in portion if question.key not in self._known]
        self.answerer.write(left, lambda number, text: self._note({left[number].key: text}, counter, stage), self.check)

    def _note(self, answers: dict[str, Any], counter: _Counter, stage: str) -> None:
        if self._journal is not None:
            self._journal.add(answers)
        self._known.update(answers)
        self.asked += len(answers)
        counter.add(set(answers), stage, is_new=True)


class _Counter:
    """Counts the questions that are answered and tells."""

    def __init__(self, keys: Sequence[str], tell: Callable[[Progress], None]) -> None:
        self._numbers: dict[str, list[int]] = {}
        for number, key in enumerate(keys):
            self._numbers.setdefault(key, []).append(number)
        self._tell, self._total = tell, len(keys)
        self._done = self._new = 0
        self._began_s = time.monotonic()

    def add(self, keys: set[str], stage: str, *, is_new: bool = False) -> None:
        newly = [number for key in keys for number in self._numbers.pop(key, ())]
        self._done += len(newly)
        self._new += len(newly) if is_new else 0
        left_s = None
        if self._new:
            left_s = (time.monotonic() - self._began_s) / self._new * (self._total - self._done)
        if newly or stage:
            self._tell(Progress(stage or "resumed", self._done, self._total, tuple(sorted(newly)), left_s))


AHEAD = 3
"""Most requests that run at a time, as a multiple of the answers that the engine writes at once."""
LOOK_EVERY_S = 0.2
"""Seconds between two looks at whether the job was cancelled and the server's engine still works."""


class EngineAnswerer:
    """Answers by an inference engine of this process. `is_well`: None when the engine is stepped here; else whether
    a server's still runs, of whose places at most half are taken."""

    def __init__(self, opened: OpenedModel, is_well: Callable[[], bool] | None = None) -> None:
        self.opened, self._is_well = opened, is_well
        self.engine: InferenceEngine = opened.engine
        places = opened.placement.max_sequences
        self._most = AHEAD * places if is_well is None else max(1, places // 2)

    @property
    def max_length(self) -> int:
        """Tokens of context and continuation together, less the last one, which is only told."""
        limits = [self.engine.speech.max_context, self.opened.placement.context_tokens]
        return min(limit for limit in limits if limit is not None) - 1

    def score(self, questions: Sequence[ScoreQuestion], check: Callable[[], None]) -> list[list[Any]]:
        texts = [self._text_of(question) for question in questions]
        told: list[Any] = []
        self._until_told(told, lambda tell: self.engine.submit_texts(texts, 1, tell), check)
        if isinstance(told[0], Exception):
            raise told[0]
        answers = []
        for question, scores in zip(questions, told[0], strict=True):
            of_continuation = scores[-len(question.continuation) :]
            logprob = sum(score.logprob for score in of_continuation)
            answers.append([logprob, all(score.is_likeliest for score in of_continuation)])
        return answers

    def write(
        self, questions: Sequence[WriteQuestion], told: Callable[[int, str], None], check: Callable[[], None]
    ) -> None:
        stamp = uuid.uuid4().hex
        requests = [self._request_of(f"{stamp}-{n}", question) for n, question in enumerate(questions)]
        for request in requests:
            self.engine.check(request)
        waiting, under_way = deque(enumerate(requests)), dict[str, int]()
        ended: deque[Answer] = deque()
        arrived = threading.Event()

        def end(answer: Answer) -> None:
            ended.append(answer)
            arrived.set()

        try:
            while waiting or under_way:
                while waiting and len(under_way) < self._most:
                    number, request = waiting.popleft()
                    under_way[request.name] = number
                    self.engine.submit(request, None, end)
                self._wait(arrived, check)
                while ended:
                    answer = ended.popleft()
                    if answer.finish in ("error", "cancelled"):
                        raise RuntimeError(f"an answer failed: {answer.error or 'the server cancelled it'}")
                    told(under_way.pop(answer.request), answer.text)
        except BaseException:
            for name in under_way:
                self.engine.cancel(name)
            raise

    def _until_told(
        self, told: list[Any], ask: Callable[[Callable[[Any], None]], None], check: Callable[[], None]
    ) -> None:
        arrived = threading.Event()

        def tell(found: Any) -> None:
            told.append(found)
            arrived.set()

        ask(tell)
        while not told:
            self._wait(arrived, check)

    def _wait(self, arrived: threading.Event, check: Callable[[], None]) -> None:
        """Run a pass, or wait for one of the server's."""
        check()
        if self._is_well is None:
            self.engine.step()
            return
        if not arrived.wait(LOOK_EVERY_S) and not self._is_well():
            raise RuntimeError("the server's engine has ended or failed; its log says why.")
        arrived.clear()

    def _text_of(self, question: ScoreQuestion) -> list[int]:
        most = self.max_length + 1
        if len(question.continuation) > most - 1:
            raise EvaluationError(
                f"a text to be scored has {len(question.continuation)} tokens, and the context is {most}. Give a "
                "larger --context, or leave this task out.",
                "tasks",
            )
        return [*question.context, *question.continuation][-most:]

    def _request_of(self, name: str, question: WriteQuestion) -> Request:
        sampling = sampling_of(question.sampling, Sampling(temperature=0.0))
        return Request(name, question.prompt, sampling)
