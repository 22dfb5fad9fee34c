"""Texts that wait to be scored or turned into vectors before the next pass: those that want the same share passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from outcore.infer.passes.runner import PassRunner
from outcore.infer.passes.scores import TextScores
from outcore.model.forward import Pooling

Texts = Sequence[Sequence[int]]
OnScores = Callable[[list[TextScores] | Exception], None]
OnVectors = Callable[[list[torch.Tensor] | Exception], None]


class WaitingTexts:
    """Texts with whom to tell. What goes wrong is told to who asked, and the engine goes on. `max_tokens`: positions
    that the model knows; None: unbounded."""

    def __init__(self, vocab_size: int, max_tokens: int | None, pooling: Pooling) -> None:
        self._vocab_size, self._max_tokens = vocab_size, max_tokens
        self._pooling: Pooling = pooling
        self.to_score: list[tuple[Texts, int, OnScores]] = []
        """With how many likeliest tokens of each place are wanted."""
        self.to_embed: list[tuple[Texts, OnVectors]] = []
        self.to_label: list[tuple[Texts, OnVectors]] = []

    @property
    def is_any(self) -> bool:
        """Whether texts wait."""
        return bool(self.to_score or self.to_embed or self.to_label)

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
        """Have all of them done."""
        pending, self.to_score = self.to_score, []
        for num_top in sorted({top for _, top, _ in pending}):
            same = [(texts, told) for texts, top, told in pending if top == num_top]
            found: list[TextScores] | Exception
            try:
                found = runner.score([text for texts, _ in same for text in texts], num_top)
            except Exception as error:
                found = error
            at = 0
            for texts, told in same:
                told(found if isinstance(found, Exception) else found[at : at + len(texts)])
                at += len(texts)
        to_embed, self.to_embed = self.to_embed, []
        to_label, self.to_label = self.to_label, []
        for vectors_of, asked in ((partial(runner.embed, pooling=self._pooling), to_embed), (runner.label, to_label)):
            for texts, tell in asked:
                try:
                    vectors: list[torch.Tensor] | Exception = vectors_of(texts)
                except Exception as error:
                    vectors = error
                tell(vectors)
