"""A pass over all layers by flow: weights come once for everything that is laid out in its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from outcore.common.errors import EngineError
from outcore.flow import Call, Flow, Output, Part, Want
from outcore.infer.attention import PagedAttention
from outcore.infer.passes.graphs import SmallPasses
from outcore.infer.passes.rows import SMALL_ROWS, RowCall, TextCall, lay_out, lay_out_texts
from outcore.infer.passes.scores import NO_NUMBERS, Scores, TextScores
from outcore.infer.schedule import Work
from outcore.model.forward import Pooling, accepted_names
from outcore.staging.pool import SmallCopies

Found = list[tuple[Work, torch.Tensor]]
"""For each complete work its logits [1 + guesses, V]."""


class PassRunner(Protocol):
    """Runs what the scheduler laid out."""

    can_step_back: bool
    """Whether tokens that were computed may turn out to be wrong guesses."""
    copies: SmallCopies
    """Way of small tensors to where logits are."""

    @property
    def is_usual(self) -> bool:
        """Whether the last pass ran as others of its size will."""
        ...

    def run(self, works: Sequence[Work]) -> Found:
        """Compute these tokens; logits of those that complete a sequence."""
        ...

    def score(self, texts: Sequence[Sequence[int]], num_top: int = 1) -> list[TextScores]:
        """For each text, every token but the first."""
        ...

    def embed(self, texts: Sequence[Sequence[int]], pooling: Pooling = "mean") -> list[torch.Tensor]:
        """For each text the mean of its tokens' last hidden states, or the last token's, of length one: fp32 [H] on the
        CPU."""
        ...

    def label(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """For each text the scores of the labels behind its last token: fp32 [labels] on the CPU."""
        ...

    def close(self) -> None:
        """Let the model go."""
        ...


class WritesOnly:
    """Part of a runner whose engine refuses texts (`Speech.scores`)."""

    def score(self, texts: Sequence[Sequence[int]], num_top: int = 1) -> list[TextScores]:
        raise NotImplementedError

    def embed(self, texts: Sequence[Sequence[int]], pooling: Pooling = "mean") -> list[torch.Tensor]:
        raise NotImplementedError

    def label(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class RunnerLimits:
    """Limits of the calls and passes that tokens are laid out in."""

    call_tokens: int = 1024
    """Tokens of one call of a layer."""
    score_tokens: int = 16384
    """Tokens of all texts that are scored in one pass."""
    is_deterministic: bool = False
    fixed_rows: int | None = None
    """Rows of a call of answers' tokens (`ScheduleLimits`)."""


class PagedRunner:
    """All sequences in shared rows, where tokens meet in attention only. `small`: runs passes of few tokens; `expect`:
    hears before each pass how many tokens it has (None: of scores, which may not depend on that)."""

    can_step_back = True
    has_rows = True
    """Whether sequences share rows of a call."""

    def __init__(
        self,
        flow: Flow,
        attention: PagedAttention,
        limits: RunnerLimits,
        device: torch.device,
        on_close: Callable[[], None] = lambda: None,
        small: SmallPasses | None = None,
        expect: Callable[[int | None], None] = lambda tokens: None,
    ) -> None:
        self.flow, self.attention, self.limits, self.device = flow, attention, limits, device
        self.small, self.copies = small, SmallCopies(device)
        self._on_close, self._expect = on_close, expect
        assert attention.cache is not None
        self._page_tokens = attention.cache.settings.page_tokens
        names, takes_any = accepted_names(flow.units.parts.decoder)
        self._takes_positions = "position_ids" in names or takes_any

    @property
    def is_usual(self) -> bool:
        return self.small is None or not self.small.is_first

    def run(self, works: Sequence[Work]) -> Found:
        self._expect(sum(work.count for work in works))
        found = None if self.small is None else self.small.run(works)
        return self._run_rows(works) if found is None else found

    def _run_rows(self, works: Sequence[Work]) -> Found:
        rows, calls = self._calls(works)
        self.attention.begin([row.tables(self._page_tokens, self.copies) for row in rows])
        found: Found = []
        for output in self.flow.run(calls, on_part=self._moved):
            if output.logits is None:
                continue
            at = 0
            for work, _ in rows[output.number].works:
                if work.is_last:
                    found.append((work, output.logits[at : at + work.num_drafts + 1]))
                    at += work.num_drafts + 1
        return found

    def _calls(self, works: Sequence[Work]) -> tuple[list[RowCall], list[Call]]:
        fixed = self.limits.fixed_rows
        usual = SMALL_ROWS if self.limits.is_deterministic else None
        rows = lay_out(works, self.limits.call_tokens, fixed or usual, is_by_place=fixed is not None)
        return rows, [self._call(row, row.batch(self.copies), {}) for row in rows]

    def _call(self, row: RowCall, batch: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]) -> Call:
        wanted = row.wanted
        positions = self.copies.to(torch.tensor(wanted, dtype=torch.long))
        return Call(batch, "logits" if wanted else "nothing", positions, inputs=inputs)

    def _taken(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Leave out positions where the decoder takes none: some count them by what they keep, or not at all."""
        return batch if self._takes_positions else {n: rows for n, rows in batch.items() if n != "position_ids"}

    def _lay_out_texts(self, texts: Sequence[Sequence[int]]) -> list[TextCall]:
        self._expect(None)
        return lay_out_texts(texts, self.limits.call_tokens if self.has_rows else 1)

    def score(self, texts: Sequence[Sequence[int]], num_top: int = 1) -> list[TextScores]:
        scores, calls = Scores(len(texts), self.device), self._lay_out_texts(texts)
        cache, self.attention.cache = self.attention.cache, None
        try:
            for group in grouped(calls, self.limits.score_tokens):
                self.attention.begin([call.tables(self.copies) for call in group])
                batches = [Call(self._taken(call.batch(self.copies)), "logprobs", num_top=num_top) for call in group]
                scores.bring(group, list(self.flow.run(batches, on_part=self._moved)))
        finally:
            self.attention.cache = cache
        return scores.all()

    def embed(self, texts: Sequence[Sequence[int]], pooling: Pooling = "mean") -> list[torch.Tensor]:
        return self._of_texts(texts, "hidden", partial(pool, pooling))

    def label(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return self._of_texts(texts, "labels", label)

    def _of_texts(self, texts: Sequence[Sequence[int]], want: Want, take: TakeVectors) -> list[torch.Tensor]:
        found: list[torch.Tensor] = [torch.zeros(0) for _ in texts]
        calls = self._lay_out_texts(texts)
        cache, self.attention.cache = self.attention.cache, None
        try:
            for group in grouped(calls, self.limits.score_tokens):
                self.attention.begin([call.tables(self.copies) for call in group])
                batches = [Call(self._taken(call.batch(self.copies)), want, call.ends(self.copies)) for call in group]
                for output in self.flow.run(batches, on_part=self._moved):
                    take(group[output.number].texts, output, found)
        finally:
            self.attention.cache = cache
        return found

    def close(self) -> None:
        self.attention.close()
        self._on_close()

    def _moved(self, part: Part, call: int, hidden: torch.Tensor) -> None:
        self.attention.moved(part.index - 1, call)


def grouped(calls: Sequence[TextCall], most_rows: int) -> list[list[TextCall]]:
    """Calls for each pass, of at most so many rows together."""
    groups: list[list[TextCall]] = []
    rows = 0
    for call in calls:
        if not groups or rows + call.num_rows > most_rows:
            groups.append([])
            rows = 0
        groups[-1].append(call)
        rows += call.num_rows
    return groups


TakeVectors = Callable[[Sequence[tuple[int, Sequence[int]]], Output, list[torch.Tensor]], None]
"""Puts what a call gave where it belongs: (its texts with their numbers, what it gave, vectors of all texts)."""


def label(texts: Sequence[tuple[int, Sequence[int]]], output: Output, found: list[torch.Tensor]) -> None:
    """Put each text's scores of labels where they belong."""
    assert output.logits is not None
    for (number, _), scores in zip(texts, output.logits.cpu(), strict=True):
        found[number] = scores
        if scores.isnan().any():
            raise EngineError(NO_NUMBERS)


def pool(
    pooling: Pooling, texts: Sequence[tuple[int, Sequence[int]]], output: Output, found: list[torch.Tensor]
) -> None:
    """Put the vector of each text where it belongs."""
    assert output.hidden is not None
    at = 0
    for number, tokens in texts:
        hidden_TH = output.hidden[0, at : at + len(tokens)].float()
        vector_H = hidden_TH.mean(0) if pooling == "mean" else hidden_TH[-1]
        found[number] = torch.nn.functional.normalize(vector_H, dim=0).cpu()
        if found[number].isnan().any():
            raise EngineError(NO_NUMBERS)
        at += len(tokens)
