"""A small model that guesses what the large one will say, and is there whole, so that its passes cost little.

Before a pass of the large model it writes a few tokens for each answer in which the text itself suggests none, drawing
them with the same numbers (seed, position): where both models agree on a token's likelihood they draw the same one. The
large model judges guesses as any others, so what is said does not change. How many are written, or none, follows from
the measured share that was right and the measured seconds of both models' passes; after a pause it is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outcore.infer.cache import KvCache, OutOfPages, SequencePages
from outcore.infer.passes.choice import choose_in_groups
from outcore.infer.passes.runner import PassRunner
from outcore.infer.requests import Row, TextStream
from outcore.infer.schedule import Clock, PassCost, Scheduler, Work
from outcore.infer.schedule import Sequence as Running

FIRST_GUESSES, MOST_GUESSES, PROBE_GUESSES = 4, 12, 2
PAUSE_PASSES = 48
"""Passes without guesses of a model whose guesses did not pay."""
FADING = 0.97
"""Weight of what is known about acceptance after one more guess."""


@dataclass(eq=False)
class _Shadow:
    """One answer as the small model has it."""

    sequence: Running
    stored: list[int] = field(default_factory=list)
    """Tokens whose keys and values it has; those behind `sure` were guesses."""
    sure: int = 0

    @property
    def pages(self) -> SequencePages:
        assert self.sequence.pages is not None
        return self.sequence.pages


class DraftModel:
    """Small model that guesses. `runner`, `cache`: of the small model, nobody else's. `pass_tokens`: it reads prompts
    in passes of so many. `vocab_size`: of the large model. `is_deterministic`: nothing that is measured decides."""

    def __init__(
        self,
        runner: PassRunner,
        cache: KvCache,
        pass_tokens: int,
        vocab_size: int,
        *,
        is_deterministic: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner, self._cache, self._pass_tokens, self._vocab_size = runner, cache, pass_tokens, vocab_size
        self._is_deterministic, self._clock = is_deterministic, clock
        self._shadows: dict[Running, _Shadow] = {}
        self.cost = PassCost()
        self._right, self._wrong = 0.0, 0.0
        self._paused = 0

    @property
    def acceptance(self) -> float:
        """Estimated probability that a guess is right when those before it were."""
        return (self._right + 1) / (self._right + self._wrong + 2)

    def prepare(self, scheduler: Scheduler) -> None:
        """Offer guesses to the answers that will be written in the next pass."""
        wanted = [s for s in scheduler.running if s.is_writing and s.left > 1 and s.drafter is not None]
        wanted = [s for s in wanted if s.drafter is not None and s.drafter.wants(s.tokens)]
        if not wanted or not scheduler.limits.draft_tokens:
            return
        count = min(self._how_many(scheduler.cost, len(wanted)), scheduler.limits.draft_tokens // len(wanted))
        if count <= 0:
            return
        ready = [shadow for sequence in wanted if (shadow := self._ready(sequence, count)) is not None]
        if ready:
            self._guess(ready, count)

    def learn_from(self, proposed: int, right: int) -> None:
        """Tell how many of one answer's guesses were right."""
        self._right = self._right * FADING + right
        self._wrong = self._wrong * FADING + (right < proposed)

    def forget(self, sequence: Running) -> None:
        """An answer has ended."""
        shadow = self._shadows.pop(sequence, None)
        if shadow is not None:
            self._cache.close(shadow.pages)

    # --- how many

    def _how_many(self, large: PassCost, answers: int) -> int:
        """Guesses for each answer that promise the most tokens a second; 0 where none do."""
        if self._is_deterministic:
            return FIRST_GUESSES
        if self._paused:
            self._paused -= 1
            return 0 if self._paused else PROBE_GUESSES
        one, own = large.seconds_of(answers), self.cost.seconds_of(answers)
        if one is None or own is None or self._right + self._wrong < 4:
            return FIRST_GUESSES
        best, best_rate = 0, 1 / one
        likely = expected = 1.0
        for count in range(1, MOST_GUESSES + 1):
            likely *= self.acceptance
            expected += likely
            seconds = (large.seconds_of(answers * (1 + count)) or one) + count * own
            if expected / seconds > best_rate:
                best, best_rate = count, expected / seconds
        if not best:
            self._paused = PAUSE_PASSES
        return best

    # --- guesses

    def _ready(self, sequence: Running, count: int) -> _Shadow | None:
        """The answer's shadow with pages for what is read and guessed; None where the small model has no room."""
        shadow = self._shadows.get(sequence)
        if shadow is None:
            request = replace(sequence.request, grammar=None)
            copy = Running(request, 0, sequence.seed, TextStream(None), None, Clock(0.0), frozenset())
            copy.pages = self._cache.open(sequence.tokens)
            stored = sequence.tokens[: copy.pages.num_cached]
            shadow = self._shadows[sequence] = _Shadow(copy, stored, len(stored))
        tokens, same = sequence.tokens, shadow.sure
        while same < min(len(shadow.stored), len(tokens) - 1) and shadow.stored[same] == tokens[same]:
            same += 1
        del shadow.stored[same:]
        shadow.sure = same
        self._cache.settle(shadow.pages, tokens, same)
        shadow.sequence.tokens = list(tokens)
        try:
            self._cache.extend(shadow.pages, len(tokens) + count)
        except OutOfPages:
            self.forget(sequence)
            return None
        return shadow

    def _guess(self, ready: Sequence[_Shadow], count: int) -> None:
        works = [work for shadow in ready for work in self._reading(shadow)]
        owners = {id(shadow.sequence): shadow for shadow in ready}
        targets = {id(shadow.sequence): sequence for sequence, shadow in self._shadows.items()}
        guesses: dict[int, list[int]] = {name: [] for name in owners}
        for step in range(count):
            began = self._clock()
            found = self._runner.run(works)
            logits = [rows[-1, : self._vocab_size] for _, rows in found]
            sequences = [work.sequence for work, _ in found]
            asked = [self._row(s, targets[id(s)], guesses[id(s)]) for s in sequences]
            chosen = choose_in_groups(logits, asked, self._runner.copies.to)
            if step and self._runner.is_usual:  # the first one also reads what was said meanwhile
                self.cost.add(len(works), self._clock() - began)
            works = []
            for sequence, token in zip(sequences, chosen, strict=True):
                own, target = guesses[id(sequence)], targets[id(sequence)]
                own.append(token.token)
                if token.token not in target.end_tokens:
                    works.append(Work(sequence, len(sequence.tokens) + len(own) - 1, (token.token,)))
                    if step < count - 1:
                        owners[id(sequence)].stored.append(token.token)
            if not works:
                break
        for name, own in guesses.items():
            drafter = targets[name].drafter
            assert drafter is not None
            drafter.offered = own

    def _reading(self, shadow: _Shadow) -> list[Work]:
        """Read what the draft model has not read yet, but for the last pass's worth, which is returned."""
        sequence, tokens = shadow.sequence, shadow.sequence.tokens
        while len(tokens) - len(shadow.stored) > self._pass_tokens:
            start = len(shadow.stored)
            part = tuple(tokens[start : start + self._pass_tokens])
            self._runner.run([Work(sequence, start, part, is_last=False)])
            shadow.stored += part
        start = len(shadow.stored)
        shadow.stored += tokens[start:]
        return [Work(sequence, start, tuple(tokens[start:]))]

    def _row(self, shadow: Running, target: Running, guessed: list[int]) -> Row:
        row = replace(target.row(None), sampling=replace(target.request.sampling, logprobs=None))
        return replace(
            row, position=len(shadow.tokens) + len(guessed), answer=[*row.answer, *guessed] if row.prompt else ()
        )
