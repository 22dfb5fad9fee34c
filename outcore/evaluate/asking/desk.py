"""Questions answered in portions that fit a pass, each noted before the next begins.

A portion is cut from the questions alone, never from what is known already: one that a kill left half-noted is asked
again whole, so the same rows meet in the same calls and the scores are the same to the last bit.

Answers as they come, by the content of their questions, so that a killed evaluation asks nothing twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outcore.common.journal import JournalHeld, JournalOfAnother, LineJournal
from outcore.evaluate.asking.question import Question, ScoreQuestion, WriteQuestion
from outcore.evaluate.settings import EvaluationError


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
    """What answers: an engine here, or one that a server runs."""

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
    """How far a list of questions is."""

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
