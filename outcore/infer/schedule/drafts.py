"""Guesses of the next tokens from the text itself: what followed the last few tokens when they stood there before.

While weights travel, a pass over ten tokens costs as much as over one, so a right guess is a token for nothing. Guesses
get longer while they come true and shorter when they do not; after some that were all wrong they pause. Whether a
guess of a given length pays is asked of the measured cost of a pass, where results need not be reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_MATCH, MAX_MATCH = 2, 4
"""Tokens that must have stood there before."""
MAX_DRAFT, FIRST_DRAFT, PAUSE = 24, 4, 12
"""Longest guess, first guess, and tokens without guesses after two that were wholly wrong."""
FADING = 0.95
"""Weight of a pass's seconds after one more pass."""


class Drafter:
    """Prompt lookup for one sequence."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        """Place where each run of tokens ended last."""
        self._seen = 0
        self._length, self._misses, self._paused_until = FIRST_DRAFT, 0, 0
        self.offered: list[int] = []
        """Guesses of a small model, for where the text suggests none."""
        self.is_from_model = False
        """Whether the last guess was that model's."""

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether the text suggests nothing."""
        return len(tokens) < self._paused_until or self._match(tokens) is None

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow; none when nothing fits or guesses pause."""
        offered, self.offered = self.offered, []
        found = self._match(tokens)
        self.is_from_model = found is None or len(tokens) < self._paused_until
        if found is None or self.is_from_model:
            return offered[: max(0, most)]
        count = min(self._length, most)
        return list(tokens[found : found + count]) if count > 0 else []

    def learn_from(self, proposed: int, accepted: int, num_tokens: int) -> None:
        """Tell how many of the last guess were right; `num_tokens`: of the sequence by now."""
        if not proposed or self.is_from_model:
            return
        if accepted == proposed:
            self._length, self._misses = min(MAX_DRAFT, 2 * self._length), 0
        elif accepted:
            self._length, self._misses = max(2, accepted + 1), 0
        else:
            self._length, self._misses = max(2, self._length // 2), self._misses + 1
            if self._misses >= 2:
                self._misses, self._paused_until = 0, num_tokens + PAUSE

    def _match(self, tokens: Sequence[int]) -> int | None:
        """Find where what followed the longest known run at the end of `tokens` begins."""
        self._learn(tokens[:-1])
        for size in range(min(MAX_MATCH, len(tokens) - 1), MIN_MATCH - 1, -1):
            place = self._places.get(tuple(tokens[-size:]))
            if place is not None and place < len(tokens):
                return place
        return None

    def _learn(self, tokens: Sequence[int]) -> None:
        for end in range(max(self._seen + 1, MIN_MATCH), len(tokens) + 1):
            for size in range(MIN_MATCH, min(MAX_MATCH, end) + 1):
                self._places[tuple(tokens[end - size : end])] = end
        self._seen = max(self._seen, len(tokens))


@dataclass
class PassCost:
    """Seconds of a pass as base + slope x rows, by least squares over recent passes."""

    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows_rows: float = 0.0
    rows_seconds: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """One pass."""
        for name, value in (
            ("weight", 1.0),
            ("rows", rows),
            ("seconds", seconds),
            ("rows_rows", rows * rows),
            ("rows_seconds", rows * seconds),
        ):
            setattr(self, name, getattr(self, name) * FADING + value)

    def seconds_of(self, rows: float) -> float | None:
        """Seconds of a pass of so many rows; None while nothing is known."""
        if not self.weight:
            return None
        base, slope = self._line()
        return base + slope * rows

    def share_of_row(self) -> float:
        """What one more row costs, as a share of a pass of few rows; 0 while it is not known."""
        base, slope = self._line()
        return slope / max(base + slope, 1e-9)

    def _line(self) -> tuple[float, float]:
        """(base, slope); no slope while too few passes tell one."""
        spread = self.weight * self.rows_rows - self.rows**2
        slope = 0.0
        if self.weight >= 3 and spread > 1e-9 * self.weight * self.rows_rows:
            slope = max(0.0, (self.weight * self.rows_seconds - self.rows * self.seconds) / spread)
        return (self.seconds - slope * self.rows) / max(self.weight, 1e-9), slope

    def longest_draft(self, acceptance: float, most: int) -> int:
        """Tokens worth guessing when each is right with this probability."""
        share = self.share_of_row()
        count, likely = 0, acceptance
        while count < most and likely > share:
            count, likely = count + 1, likely * acceptance
        return count
