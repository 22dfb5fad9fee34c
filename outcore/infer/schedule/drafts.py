"""Guesses of the next tokens from the text itself: what followed the last few tokens when they stood there before.

While weights travel, a pass over ten tokens costs as much as over one, so a right guess is a token for nothing. How
long a guess pays is asked of the measured cost of a row and of how many of the last guesses came true; where results
must be reproducible, of a cost that is taken for granted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_MATCH, MAX_MATCH, MATCH_BESIDE_MODEL = 1, 6, 3
"""Tokens that must have stood there before; at least so many where a small model guesses better than a short match."""
MAX_DRAFT = 24
"""Longest guess."""
FADING = 0.95
"""Weight of a pass's seconds after one more pass."""
FORGETTING = 0.9
"""Weight of a guess's outcome after one more guess: edited text changes between copied and new."""
ASSUMED_SHARE = 0.05
"""Cost of a row, as a share of a pass of few rows, where measured costs must not decide or tell too little yet."""
TRIED_DRAFTS = 8
"""Guesses of a sequence after which measured costs decide."""


class Drafter:
    """Prompt lookup for one sequence."""

    def __init__(self, beside_model: bool = False) -> None:
        self._least = MATCH_BESIDE_MODEL if beside_model else MIN_MATCH
        self._places: dict[tuple[int, ...], int] = {}
        """Place where each run of tokens ended last."""
        self._seen = 0
        self._right = self._wrong = 0.0
        self.offered: list[int] = []
        """Guesses of a small model, for where the text suggests none."""
        self.is_from_model = False
        """Whether the last guess was that model's."""

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether the text suggests nothing."""
        return self._match(tokens) is None

    def propose(self, tokens: Sequence[int], most: int, share_of_row: float = ASSUMED_SHARE) -> list[int]:
        """Up to `most` tokens that may follow, as many as pay where a row costs this share of a pass; none when nothing
        fits."""
        offered, self.offered = self.offered, []
        found = self._match(tokens)
        self.is_from_model = found is None
        if found is None:
            return offered[: max(0, most)]
        right = (self._right + 1) / (self._right + self._wrong + 2)
        count, likely = 0, right
        while count < min(most, MAX_DRAFT) and likely > share_of_row:
            count, likely = count + 1, likely * right
        if not count and most > 0:
            self._forget()  # so that it is tried again
        guess: list[int] = []
        for place in range(found, found + count):  # past the end the guess itself goes on, as a text that repeats does
            guess.append(tokens[place] if place < len(tokens) else guess[place - len(tokens)])
        return guess

    def learn_from(self, proposed: int, accepted: int) -> None:
        """Tell how many of the last guess were right."""
        if proposed and not self.is_from_model:
            self._forget()
            self._right, self._wrong = self._right + accepted, self._wrong + (accepted < proposed)

    def _forget(self) -> None:
        self._right, self._wrong = FORGETTING * self._right, FORGETTING * self._wrong

    def _match(self, tokens: Sequence[int]) -> int | None:
        """Find where what followed the longest known run at the end of `tokens` begins."""
        self._learn(tokens[:-1])
        for size in range(min(MAX_MATCH, len(tokens) - 1), self._least - 1, -1):
            place = self._places.get(tuple(tokens[-size:]))
            if place is not None and place < len(tokens):
                return place
        return None

    def _learn(self, tokens: Sequence[int]) -> None:
        for end in range(max(self._seen + 1, self._least), len(tokens) + 1):
            for size in range(self._least, min(MAX_MATCH, end) + 1):
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
