"""A teacher as the judge of each token of a model's own answers (`--method on_policy_distill`).

A token's advantage is the teacher's log-probability of it less the model's own, with which it was drawn: on average
over such tokens minus KL(model || teacher), whose gradient the policy gradient is then (Agarwal et al. 2024,
"On-policy distillation of language models"; Gu et al. 2024, MiniLLM). Answers are the model's, so it learns where it
itself goes; the teacher only reads them, all of a step in one pass over its streamed layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from outcore.data.cache import Target
from outcore.sizing.streaming import READ_ROWS
from outcore.train.methods.address import IGNORED
from outcore.train.methods.distill import padded


class AnswerRows:
    """Prompts with their answers, as a teacher is asked about rows: the answers bear loss."""

    def __init__(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        self._pairs = list(zip(prompts, answers, strict=True))

    def __len__(self) -> int:
        return len(self._pairs)

    def documents_of(self, row: int) -> list[np.ndarray]:
        """The row's tokens."""
        return [np.array([*self._pairs[row][0], *self._pairs[row][1]], np.uint32)]

    def batch(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """input_ids, attention_mask and labels [rows, longest], padded on the right."""
        found = []
        for prompt, answer in (self._pairs[row] for row in rows):
            ids = torch.tensor([*prompt, *answer])
            labels = torch.tensor([*[IGNORED] * len(prompt), *answer])
            found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
        return padded(found)


class TeacherRewards:
    """Judge of a run's answers, as TRL calls it. A reward is the mean over the answer's tokens, in nats."""

    def __init__(self, said_of: Callable[..., Iterator[Target]]) -> None:
        self.__name__ = "teacher"
        self.left_out: list[bool] = []
        """Whether each answer of the last call is left out: none is."""
        self.answered: dict[str, list[Any]] = {}
        """Answers to be judged next: prompt_ids, completion_ids and logprobs of each."""
        self.advantages: torch.Tensor
        """Advantage of each token of the last call: fp32 [answers, tokens of the longest]."""
        self._said_of = said_of

    def try_out(self) -> None:
        """Ask about one token: whoever says nothing is known before the run begins, and the teacher's buffers are on
        the device before the model that is trained counts what is free there."""
        list(self._said_of(AnswerRows([[0]], [[0]]), range(1)))

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        rows = AnswerRows(self.answered["prompt_ids"], self.answered["completion_ids"])
        chunks = (range(at, min(at + READ_ROWS, len(rows))) for at in range(0, len(rows), READ_ROWS))
        said = [torch.from_numpy(target.logprobs) for chunk in chunks for target in self._said_of(rows, chunk)]
        own = [torch.tensor(logprobs) for logprobs in self.answered["logprobs"]]
        less = [theirs - ours for theirs, ours in zip(said, own, strict=True)]
        self.advantages = torch.nn.utils.rnn.pad_sequence(less, batch_first=True)
        self.left_out = [False] * len(completions)
        return [float(one.mean()) for one in less]
