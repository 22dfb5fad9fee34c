"""Texts that wait to be scored or turned into vectors before the next pass: those that want the same share passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from outcore.infer.passes.runner import PassRunner
from outcore.infer.passes.scores import TextScores
from outcore.model.forward import Pooling

Texts = Sequence[Sequence[int]]
OnScores = Callable[[list[TextScores] | Exception], None]
OnVectors = Callable[[list[torch.Tensor] | Exception], None]
Want = Literal["scores", "vectors", "labels"]
PORTION_TOKENS = 1 << 15
"""Tokens of texts between two passes of answers: two passes of scores. A longer text goes alone."""


@dataclass(eq=False)
class _Asked:
    """Texts of one who asked, and what was found for them so far."""

    want: Want
    texts: Texts
    tell: Callable[[Any], None]
    is_wanted: Callable[[], bool]
    num_top: int
    found: list[Any] = field(default_factory=list)

    def goes_with(self, other: _Asked) -> bool:
        """Whether both may share passes."""
        return self is other or (self.want == other.want == "scores" and self.num_top == other.num_top)


class WaitingTexts:
    """Texts with whom to tell. What goes wrong is told to who asked, and the engine goes on. `max_tokens`: positions
    that the model knows; None: unbounded."""

    def __init__(self, vocab_size: int, max_tokens: int | None, pooling: Pooling) -> None:
        self._vocab_size, self._max_tokens = vocab_size, max_tokens
        self._pooling: Pooling = pooling
        self._asked: list[_Asked] = []

    @property
    def is_any(self) -> bool:
        """Whether texts wait."""
        return bool(self._asked)

    def add(
        self, want: Want, texts: Texts, tell: Callable[[Any], None], is_wanted: Callable[[], bool], num_top: int = 1
    ) -> None:
        """Have these wait behind others. `is_wanted`: whether anybody waits for them yet; `num_top`: likeliest tokens
        of each place that are wanted with scores."""
        if texts:
            self._asked.append(_Asked(want, texts, tell, is_wanted, num_top))
        else:
            tell([])

    def check(self, texts: Texts) -> None:
        """ValueError for texts that cannot be scored."""
        limit = self._max_tokens
        for number, tokens in enumerate(texts):
            if len(tokens) < 1:
                raise ValueError(f"text {number} has no tokens.")
            if any(not 0 <= token < self._vocab_size for token in tokens):
                raise ValueError(f"text {number} has tokens outside the vocabulary of {self._vocab_size}.")
            if limit is not None and len(tokens) > limit:
                raise ValueError(f"text {number} has {len(tokens)} tokens, more than the {limit} that fit. Cut it.")

    def run(self, runner: PassRunner) -> None:
        """Have a portion of them done, those first that came first. What nobody waits for any more is dropped."""
        left = PORTION_TOKENS
        while left > 0:
            self._asked = [asked for asked in self._asked if asked.is_wanted()]
            portion = self._portion(left)
            if not portion or (left < PORTION_TOKENS and sum(len(text) for _, text in portion) > left):
                return
            left -= sum(len(text) for _, text in portion)
            self._do(runner, portion)

    def _portion(self, most_tokens: int) -> list[tuple[_Asked, Sequence[int]]]:
        """Take the next texts: together at most that many tokens, or a single longer text."""
        portion: list[tuple[_Asked, Sequence[int]]] = []
        for asked in self._asked:
            if not asked.goes_with(self._asked[0]):
                continue
            for text in asked.texts[len(asked.found) :]:
                most_tokens -= len(text)
                if most_tokens < 0 and portion:
                    return portion
                portion.append((asked, text))
        return portion

    def _do(self, runner: PassRunner, portion: Sequence[tuple[_Asked, Sequence[int]]]) -> None:
        first, texts = portion[0][0], [text for _, text in portion]
        try:
            if first.want == "scores":
                results: Sequence[Any] = runner.score(texts, first.num_top)
            else:
                results = runner.embed(texts, self._pooling) if first.want == "vectors" else runner.label(texts)
        except Exception as error:
            for asked in dict.fromkeys(asked for asked, _ in portion):
                self._asked.remove(asked)
                asked.tell(error)
            return
        for (asked, _), found in zip(portion, results, strict=True):
            asked.found.append(found)
        for asked in dict.fromkeys(asked for asked, _ in portion):
            if len(asked.found) == len(asked.texts):
                self._asked.remove(asked)
                asked.tell(asked.found)
