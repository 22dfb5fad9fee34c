"""Which tokens of which sequences go through the next pass.

Answers that are being written come first, one token each (and their guesses); what is left of the pass goes to prompts
in chunks, in the order of priority and arrival. While answers wait for the pass's end, passes cost the same: attention
counts, so chunks get shorter the more stands before them. A prompt that runs alone fills passes, which are fewer then.
A sequence that finds no page waits, or takes those of the one that arrived last, which computes its tokens again later.
Prompts of which little is to be read, because they are short or begin as an earlier one, go before long ones, in half
of a pass at most; one that came `AHEAD_S` earlier is not overtaken, so that every prompt's turn comes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from outcore.common.quantities import counted
from outcore.infer.cache import KvCache, OutOfPages, SequencePages
from outcore.infer.schedule.cost import PassCost
from outcore.infer.schedule.sequence import Sequence
from outcore.sizing.inference import RowCost

logger = logging.getLogger(__name__)
BRIEF_SHARE = 4
"""Little is to be read of a prompt that takes at most this part of a pass."""
AHEAD_S = 10.0
"""Seconds by which a prompt of which little is to be read counts as earlier in the queue."""


@dataclass(frozen=True)
class ScheduleLimits:
    """Limits of what a pass may hold."""

    max_sequences: int = 256
    """Sequences that run at the same time."""
    pass_tokens: int = 4096
    """Tokens of a pass."""
    chunk_tokens: int = 1024
    """Tokens of one call of a layer, and of one chunk of a prompt."""
    draft_tokens: int = 64
    """Guessed tokens of a pass, of all sequences together; 0: none are guessed."""
    whole_chunks: bool = False
    """Chunks end at multiples of `chunk_tokens`, never where a pass happens to be full."""
    fixed_rows: int | None = None
    """Rows of a call of answers' tokens, where each call has one of two sizes and those of prompts have
    `chunk_tokens`: prompts are cut where such a call is full, and guesses take the rows that answers leave."""
    is_deterministic: bool = False
    """Nothing that is measured decides: guesses depend on their own text alone."""
    row_cost: RowCost = field(default_factory=RowCost)


@dataclass(frozen=True)
class Work:
    """Tokens of one sequence in the next pass."""

    sequence: Sequence
    start: int
    tokens: tuple[int, ...]
    num_drafts: int = 0
    """Number of guesses among them, at the end."""
    is_last: bool = True
    """Whether all of the sequence's known tokens are computed with it, so that a new one can be chosen."""

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def guesses(self) -> tuple[int, ...]:
        return self.tokens[self.count - self.num_drafts :]

    @property
    def num_wanted(self) -> int:
        """Tokens, at the end, whose logits are wanted."""
        return self.num_drafts + 1 if self.is_last else 0

    @property
    def pages(self) -> SequencePages:
        """Pages of the sequence, which every work has."""
        assert self.sequence.pages is not None
        return self.sequence.pages

    def is_continued(self, most: int | None) -> bool:
        """Whether these are a few tokens, up to so many, behind others. None: tokens of the answer, which no cut and
        no page that was found makes of a prompt's."""
        return self.start >= self.sequence.num_prompt if most is None else self.start > 0 and self.count <= most

    def begin_masks(self) -> None:
        """Have what a grammar allows worked out beside the pass, for every token that it may choose."""
        if self.is_last and self.sequence.matcher is not None:
            self.sequence.matcher.begin(self.guesses)


@dataclass
class _Left:
    """Room that a pass still has."""

    tokens: int
    cost: float
    """In tokens without context; the tokens alone where no answer waits for the end of the pass."""

    def chunk(self, start: int, most: int, row_cost: RowCost) -> int:
        """Tokens of the next chunk of a prompt; 0: there is no room."""
        return row_cost.most(start, self.cost, min(most, self.tokens))

    def take(self, start: int, count: int, row_cost: RowCost) -> None:
        self.tokens, self.cost = self.tokens - count, self.cost - row_cost.of(start, count)

    def half(self) -> _Left:
        """Take half of the room out."""
        half = _Left(self.tokens // 2, self.cost / 2)
        self.tokens, self.cost = self.tokens - half.tokens, self.cost - half.cost
        return half

    def give_back(self, other: _Left) -> None:
        """Have the room that another left."""
        self.tokens, self.cost = self.tokens + other.tokens, self.cost + other.cost


class Scheduler:
    """Scheduler of passes. `waiting` and `running` are in order of priority and arrival."""

    def __init__(self, cache: KvCache, limits: ScheduleLimits) -> None:
        self.cache, self.limits = cache, limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.failed: list[Sequence] = []
        """Sequences that could not begin, until they are taken out here; they hold nothing."""
        self.cost = PassCost()
        self.num_preempted = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. ValueError when it could never run."""
        most = self.cache.most_tokens()
        wanted = sequence.num_prompt + sequence.request.sampling.max_tokens
        if wanted > most:
            raise ValueError(
                f"the prompt has {counted(sequence.num_prompt, 'token')} and may get "
                f"{sequence.request.sampling.max_tokens} more, but the cache holds {most}. "
                f"Shorten the prompt, lower {sequence.request.sampling.length_name}, or give the cache more room."
            )
        known = self.cache.known_tokens(sequence.tokens, sequence.request.adapter)
        sequence.is_brief = sequence.num_prompt - known <= self.limits.pass_tokens // BRIEF_SHARE
        place = next((i for i, s in enumerate(self.waiting) if _turn(s) > _turn(sequence)), len(self.waiting))
        self.waiting.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its pages."""
        if sequence.pages is not None:
            self.cache.close(sequence.pages)
            sequence.pages = None
        self.waiting = [s for s in self.waiting if s is not sequence]
        self.running = [s for s in self.running if s is not sequence]

    def next_pass(self, now_s: float) -> list[Work]:
        """Work for the next pass, pages ready; empty when nothing is to do."""
        works = self._works(now_s)
        if not works and not self.is_idle:
            # Of two prompts alike that were read at once, pages of the one that ended may stand in the index before
            # those of the other, which is under way: nobody uses them, and no end of a chain is free to go.
            self.cache.clear_prefixes(keeps=True)
            works = self._works(now_s)
        assert works or self.is_idle, "sequences wait and nothing can run"
        return works

    def done(self, work: Work, computed: int) -> None:
        """The pass has run; `computed` tokens of the sequence are right and stored."""
        sequence = work.sequence
        sequence.computed = computed
        if sequence.pages is not None:
            self.cache.settle(sequence.pages, sequence.tokens, computed)

    # --- parts of a pass

    def _works(self, now_s: float) -> list[Work]:
        works: list[Work] = []
        limits, row_cost = self.limits, self.limits.row_cost
        left, rows = _Left(limits.pass_tokens, limits.pass_tokens), sum(s.is_writing for s in self.running)
        drafts = limits.draft_tokens
        if limits.fixed_rows is not None:
            drafts = min(drafts, -rows % limits.fixed_rows)
        for sequence in list(self.running):
            if sequence.is_writing and sequence.pages is not None and left.tokens > 0:
                work = self._writing(sequence, min(drafts, left.tokens - 1), rows, works)
                if work is not None:
                    works.append(work)
                    left.take(work.start, work.count, row_cost)
                    drafts, rows = drafts - work.num_drafts, rows + work.num_drafts
        if works:
            left.cost = max(left.cost, RowCost.LEAST_READ * limits.pass_tokens)
        else:
            row_cost = RowCost()
        reading = [sequence for sequence in self.running if not sequence.is_writing]
        if reading and self.waiting and _turn(self.waiting[0]) < min(map(_turn, reading)):
            half = left.half()
            self._admit_waiting(now_s, half, row_cost, works, only_brief=True)
            left.give_back(half)
        for sequence in reading:
            if sequence.pages is not None and left.tokens > 0:
                self._reading(sequence, left, row_cost, works)
        self._admit_waiting(now_s, left, row_cost, works)
        return works

    def _admit_waiting(
        self, now_s: float, left: _Left, row_cost: RowCost, works: list[Work], *, only_brief: bool = False
    ) -> None:
        while self.waiting and left.tokens > 0 and left.cost > 0 and len(self.running) < self.limits.max_sequences:
            sequence = self.waiting[0]
            if only_brief and not sequence.is_brief:
                break
            try:
                self._admit(sequence, now_s)
            except Exception as error:  # it would be raised again by every pass, and nobody be answered
                logger.exception("the request %s could not begin", sequence.request.name)
                sequence.finish, sequence.error = "error", f"{type(error).__name__}: {error}"
                self.waiting.remove(sequence)
                self.failed.append(sequence)
                continue
            if not self._reading(sequence, left, row_cost, works):
                if sequence in self.running:  # no page for it now: back, with what it holds given up
                    self._send_back(sequence)
                break

    def _writing(self, sequence: Sequence, most_drafts: int, rows: int, works: list[Work]) -> Work | None:
        tokens, drafts = sequence.tokens, self._drafts(sequence, most_drafts, rows)
        if not self._room(sequence, len(tokens) + len(drafts), works):
            drafts = []
            if not self._room(sequence, len(tokens), works, may_preempt=True):
                return None
        return Work(sequence, len(tokens) - 1, (tokens[-1], *drafts), len(drafts))

    def _drafts(self, sequence: Sequence, most: int, rows: int) -> list[int]:
        """Guesses, as many as pay in a pass that has so many rows without them."""
        if sequence.drafter is None:
            return []
        worth = PassCost().worth if self.limits.is_deterministic else partial(self.cost.worth, rows=rows)
        drafts = sequence.drafter.propose(sequence.tokens, min(most, sequence.left - 1), worth)
        return drafts if sequence.matcher is None else drafts[: sequence.matcher.count_allowed(drafts)]

    def _reading(self, sequence: Sequence, left: _Left, row_cost: RowCost, works: list[Work]) -> bool:
        """Add chunks of a prompt (or of a sequence that lost its pages); whether there were any."""
        begin = start = sequence.computed
        end, size, whole = len(sequence.tokens), self.limits.chunk_tokens, self.limits.whole_chunks
        assert sequence.pages is not None
        while start < end:
            known = min(sequence.pages.next_cut(start, end) - start, self._rest_of_call(sequence, start, works))
            count = left.chunk(start, min(known, size), row_cost)
            least = min(known, size - start % size) if whole else 1
            if whole or not count:
                is_first = all(work.sequence.is_writing for work in works)
                count = least if count >= least or is_first else 0  # one always goes
            if not count or not self._room(sequence, start + count, works, may_preempt=start > 0 or not works):
                break
            tokens = tuple(sequence.tokens[start : start + count])
            works.append(Work(sequence, start, tokens, is_last=start + count == end))
            left.take(start, count, row_cost)
            start += count
        return start > begin

    def _rest_of_call(self, sequence: Sequence, start: int, works: list[Work]) -> int:
        """Tokens from `start` on that may be computed together where calls have fixed sizes."""
        size, fixed_rows = self.limits.chunk_tokens, self.limits.fixed_rows
        if fixed_rows is None or start >= sequence.num_prompt:
            return fixed_rows or size
        of_prompts = sum(work.count for work in works if not work.is_continued(None))
        return min(sequence.num_prompt - start, size - of_prompts % size)

    def _admit(self, sequence: Sequence, now_s: float) -> None:
        # An answer's tokens have other bits than a prompt's where these may not depend on company.
        end = sequence.num_prompt + 1 if self.limits.is_deterministic else None
        sequence.pages = self.cache.open(sequence.tokens[:end], sequence.request.adapter)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.pages.is_minor = sequence.request.priority < 0
        if self.limits.is_deterministic:
            sequence.pages.most_shared = sequence.num_prompt
        sequence.computed = sequence.pages.num_cached
        if sequence.clock.began_s is None:
            sequence.clock.began_s = now_s
            sequence.cached_tokens = sequence.computed
            sequence.read_tokens = sequence.pages.num_read * self.cache.settings.page_tokens

    def _room(self, sequence: Sequence, length: int, works: list[Work], *, may_preempt: bool = False) -> bool:
        """Have pages for so many tokens, if need be those of sequences that came later and are in no work yet."""
        assert sequence.pages is not None
        while True:
            try:
                self.cache.extend(sequence.pages, length)
                return True
            except OutOfPages:
                busy = {id(work.sequence) for work in works}
                later = self.running[self.running.index(sequence) + 1 :]
                victims = [s for s in later if id(s) not in busy]
                if not may_preempt or not victims:
                    return False
                self._send_back(victims[-1])
                self.num_preempted += 1

    def _send_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        assert sequence.pages is not None
        self.cache.close(sequence.pages)
        sequence.pages, sequence.computed = None, 0
        self.waiting.insert(0, sequence)


def _turn(sequence: Sequence) -> tuple[int, float]:
    """Place in the queue: by priority, then by arrival."""
    return -sequence.request.priority, sequence.clock.arrived_s - AHEAD_S * sequence.is_brief


def rows_of(works: Iterable[Work]) -> int:
    """Tokens of a pass."""
    return sum(work.count for work in works)
