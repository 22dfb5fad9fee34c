"""Scores of texts: how likely each token was after those before it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import torch

from outcore.common.errors import EngineError
from outcore.flow import Output
from outcore.flow.trace import Moment, moment, wait_for
from outcore.infer.passes.rows import TextCall

NO_NUMBERS = (
    "the model's results are not numbers (NaN): weights are damaged, or too large for this precision. "
    "Download the model again, or try --precision fp32."
)


class TokenScore(NamedTuple):
    """Likelihood of one token after those before it, as a natural logarithm."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens at its place, with theirs."""
    rank: int = 0
    """Place of the token among all tokens, from 1 on; 0 where the likeliest one alone was asked for."""

    @property
    def is_likeliest(self) -> bool:
        return self.logprob >= self.top[0][1]


class TextScores(Sequence[TokenScore]):
    """Scores of the N - 1 tokens of a text after its first, made one by one as they are looked at. `logprobs` [N - 1],
    `top_ids` and `top_logprobs` [N - 1, likeliest tokens], `ranks` [N - 1], on the CPU."""

    def __init__(
        self, logprobs: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor, ranks: torch.Tensor
    ) -> None:
        self.logprobs, self.top_ids, self.top_logprobs, self._ranks = logprobs, top_ids, top_logprobs, ranks

    def __len__(self) -> int:
        return len(self.logprobs)

    @overload
    def __getitem__(self, index: int) -> TokenScore: ...
    @overload
    def __getitem__(self, index: slice) -> TextScores: ...
    def __getitem__(self, index: int | slice) -> TokenScore | TextScores:
        found = self.logprobs[index], self.top_ids[index], self.top_logprobs[index], self._ranks[index]
        if isinstance(index, slice):
            return TextScores(*found)
        logprob, ids, tops, rank = found
        return _score(float(logprob), ids.tolist(), tops.tolist(), int(rank))

    def __iter__(self) -> Iterator[TokenScore]:
        rows = (self.logprobs, self.top_ids, self.top_logprobs, self._ranks)
        return itertools.starmap(_score, zip(*(values.tolist() for values in rows), strict=True))


def _score(logprob: float, ids: list[int], tops: list[float], rank: int) -> TokenScore:
    return TokenScore(logprob, tuple(zip(ids, tops, strict=True)), rank)


class Scores:
    """Results of texts on their way from the device: put where they belong while the next pass runs."""

    def __init__(self, num_texts: int, device: torch.device) -> None:
        nothing = torch.zeros(0), torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 1), torch.zeros(0)
        self._found = [TextScores(*nothing) for _ in range(num_texts)]
        self._device = device
        self._coming: list[tuple[TextCall, list[torch.Tensor]]] = []
        self._come: Moment | None = None

    def bring(self, calls: Sequence[TextCall], outputs: Sequence[Output]) -> None:
        """Have the results of a pass copied, then take those of the pass before."""
        coming = []
        for call, output in zip(calls, outputs, strict=True):
            found = (output.logprobs, output.top_ids, output.top_logprobs, output.ranks)
            values = [value[0].to("cpu", non_blocking=True) for value in found if value is not None]
            assert len(values) == len(found), "a call that asks for log-probabilities gets all of these"
            coming.append((call, values))
        come = moment(self._device)
        self.all()
        self._coming, self._come = coming, come

    def all(self) -> list[TextScores]:
        """The scores of every text, once they have come. EngineError where they are not numbers."""
        if self._come is not None:
            wait_for(self._come, "a pass")
        for call, tensors in self._coming:
            at = 0
            for number, tokens in call.texts:
                self._found[number] = TextScores(*(value[at + 1 : at + len(tokens)].clone() for value in tensors))
                at += len(tokens)
                if self._found[number].logprobs.isnan().any():
                    raise EngineError(NO_NUMBERS)
        self._coming = []
        return self._found
