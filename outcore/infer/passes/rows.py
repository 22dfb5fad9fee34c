"""Work of a pass laid out in rows: which tokens of which sequences make one call of every layer.

Single tokens and chunks of prompts lie side by side. Where results must not depend on what else runs, every call has
one of two sizes, filled up with tokens that nobody reads: a matrix product of one shape gives each row the same bits
whatever the other rows hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from outcore.infer.cache import PassTables, SequencePages, Span
from outcore.infer.schedule import Work
from outcore.staging.pool import SmallCopies

PROMPTS = 64
"""Prompts of a call of fixed size."""
SMALL_ROWS = 32
"""Rows of a call of single tokens, where calls have fixed sizes and none is a graph."""


@dataclass
class RowCall:
    """One row of tokens, and where each piece of work lies in it."""

    works: list[tuple[Work, int]] = field(default_factory=list)
    """With the place of its first token."""
    num_rows: int = 0
    padded_rows: int = 0
    padded_wanted: int = 0
    """Rows of logits at least, where calls have fixed sizes."""

    @property
    def wanted(self) -> list[int]:
        """Places whose logits choose tokens: the last one of each work that is complete, and those of its guesses."""
        places = [
            at + work.count - 1 - work.num_drafts + place
            for work, at in self.works
            if work.is_last
            for place in range(work.num_drafts + 1)
        ]
        return places + [0] * max(0, self.padded_wanted - len(places)) if places else []

    def batch(self, copies: SmallCopies) -> dict[str, torch.Tensor]:
        """input_ids and position_ids [1, N]."""
        ids = [token for work, _ in self.works for token in work.tokens]
        positions = [work.start + i for work, _ in self.works for i in range(work.count)]
        filling = self.padded_rows - self.num_rows
        rows = copies.to(torch.tensor([ids + [0] * filling, positions + [0] * filling], dtype=torch.long))
        return {"input_ids": rows[:1], "position_ids": rows[1:].clone()}  # its place in memory would tell its length

    def tables(self, page_tokens: int, copies: SmallCopies) -> PassTables:
        """Tables of where its tokens are stored."""
        spans = []
        for work, at in self.works:
            pages = work.sequence.pages
            assert pages is not None
            spans.append(Span(pages, work.start, work.count, at, work.is_continued(None)))
        return PassTables(spans, page_tokens, copies, num_rows=self.padded_rows)


def lay_out(
    works: Iterable[Work], call_tokens: int, fixed_rows: int | None, *, is_by_place: bool = False
) -> list[RowCall]:
    """Fill calls with works in their order; a work is never cut. `fixed_rows`: of a call of single tokens, where calls
    have fixed sizes; None: they have not. `is_by_place`: such a call is of answers' tokens, however many a sequence
    has; else of all works that it holds."""
    if fixed_rows is None:
        return _filled(works, call_tokens)
    everything = list(works)
    small = min(fixed_rows, call_tokens)
    is_small = [work.is_continued(None) if is_by_place else work.count <= small for work in everything]
    calls = _filled([w for w, is_one in zip(everything, is_small, strict=True) if not is_one], call_tokens, PROMPTS)
    for call in calls:
        call.padded_rows = call_tokens
        call.padded_wanted = max(small, call_tokens // small)
    of_single = _filled([w for w, is_one in zip(everything, is_small, strict=True) if is_one], small)
    for call in of_single:
        call.padded_rows = call.padded_wanted = small
    return calls + of_single


def lay_out_alone(works: Iterable[Work], call_tokens: int) -> list[RowCall]:
    """Fill calls with works that may not share a row: each has a call of its own, but the last single tokens of
    sequences under way, which are rows of one batch, behind the chunks that come before them."""
    alone, single = [], []
    for work in works:
        (single if work.count == 1 and work.start and work.is_last else alone).append(work)
    return [call for work in alone for call in _filled([work], call_tokens)] + _filled(single, call_tokens)


def _filled(works: Iterable[Work], call_tokens: int, most_works: int | None = None) -> list[RowCall]:
    calls: list[RowCall] = []
    for work in works:
        if not calls or calls[-1].num_rows + work.count > call_tokens or len(calls[-1].works) == most_works:
            calls.append(RowCall())
        call = calls[-1]
        call.works.append((work, call.num_rows))
        call.num_rows += work.count
        call.padded_rows = call.num_rows
    return calls


@dataclass(frozen=True)
class TextCall:
    """Whole texts in one row, to be scored: each token's likelihood after those before it."""

    texts: tuple[tuple[int, Sequence[int]], ...]
    """(number of the text, its tokens)."""

    @property
    def num_rows(self) -> int:
        return sum(len(tokens) for _, tokens in self.texts)

    def batch(self, copies: SmallCopies) -> dict[str, torch.Tensor]:
        """input_ids, position_ids and labels [1, N]; a text's first token has no label."""
        ids = [token for _, tokens in self.texts for token in tokens]
        positions = [i for _, tokens in self.texts for i in range(len(tokens))]
        labels = [-100 if i == 0 else token for _, tokens in self.texts for i, token in enumerate(tokens)]
        rows = copies.to(torch.tensor([ids, positions, labels], dtype=torch.long))
        return {"input_ids": rows[:1], "position_ids": rows[1:2].clone(), "labels": rows[2:]}

    def ends(self, copies: SmallCopies) -> torch.Tensor:
        """Place of each text's last token in the row."""
        lengths = torch.tensor([len(tokens) for _, tokens in self.texts], dtype=torch.long)
        return copies.to(lengths.cumsum(0) - 1)

    def tables(self, copies: SmallCopies) -> PassTables:
        """Spans of texts that begin here; nothing is stored."""
        spans, row = [], 0
        for _, tokens in self.texts:
            spans.append(Span(SequencePages([]), 0, len(tokens), row))
            row += len(tokens)
        return PassTables(spans, 1, copies)


def lay_out_texts(texts: Sequence[Sequence[int]], call_tokens: int) -> list[TextCall]:
    """Texts in calls of at most `call_tokens` tokens (a longer text has a call of its own), longest first."""
    calls: list[list[tuple[int, Sequence[int]]]] = []
    rows = 0
    for number in sorted(range(len(texts)), key=lambda n: -len(texts[n])):
        if not calls or rows + len(texts[number]) > call_tokens:
            calls.append([])
            rows = 0
        calls[-1].append((number, texts[number]))
        rows += len(texts[number])
    return [TextCall(tuple(call)) for call in calls]
