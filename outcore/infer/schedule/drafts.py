"""Guesses of the next tokens from the text itself: what followed its last few tokens when they stood there before.

While weights travel, a pass over sixty tokens costs as much as over one, so a right guess is a token for nothing. The
longest run of tokens that ends the text and stood in it before is followed from token to token, whether or not guesses
are made of it. So it is known, free of charge, how often what follows a run of such a length comes true: in copied text
nearly always behind long runs, in a story seldom behind short ones. Guesses are as many as make the most of a pass by
these chances and by what passes cost (`PassCost`); none where none pay. Runs that come true again are guessed from
again at once.
Cost: some microseconds a token, and where runs part a walk over the last places where the same two tokens stand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

MATCH_BESIDE_MODEL = 3
"""Tokens that must have stood there before, where a small model guesses better than a short match."""
MAX_DRAFT = 63
"""Longest guess: with the token before it 64 rows, which CUDA graphs hold."""
LONGEST_RUN, MOST_PLACES = 32, 64
"""Length from which runs count as equally long, and places that are compared."""
FORGETTING = 0.97
"""Weight of an outcome after one more: edited text changes between copied and new."""
USUAL_CHANCES = (0.2, 0.45, 0.7, 0.9, 0.97)
"""Chances that what followed comes true behind runs of 1, 2, 4, 8 and 16 tokens and more, until outcomes tell."""
WEIGHT_OF_USUAL = 3.0
"""Outcomes that the usual chance counts for."""


class Drafter:
    """Prompt lookup for one sequence."""

    def __init__(self, beside_model: bool = False) -> None:
        self._least = MATCH_BESIDE_MODEL if beside_model else 1
        self._behind_one: dict[int, int] = {}
        self._behind_two: dict[tuple[int, ...], int] = {}
        """Place behind the last occurrence of a token, and of two."""
        self._earlier: list[int] = [0]
        """For each place, the last one before it that the same two tokens stand before; 0: there is none."""
        self._place, self._length = 0, 0
        """Place where what may follow begins, and length of the run before it that ends the text, too; 0: none does."""
        self._right = [WEIGHT_OF_USUAL * chance for chance in USUAL_CHANCES]
        self._tried = [WEIGHT_OF_USUAL] * len(USUAL_CHANCES)
        """Outcomes by length of the run: its tokens came true, or not."""
        self.offered: list[int] = []
        """Guesses of a small model, for where the text suggests none."""
        self.is_from_model = False
        """Whether the last guess was that model's."""

    @property
    def run_length(self) -> int:
        """Length of the run that ends the text and stood there before."""
        return self._length

    @property
    def rates(self) -> list[float]:
        """Share of guesses that came true, by length of the run."""
        return [right / tried for right, tried in zip(self._right, self._tried, strict=True)]

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether the text suggests nothing."""
        self._follow(tokens)
        return self._length < self._least

    def propose(self, tokens: Sequence[int], most: int, worth: Callable[[Collection[float]], int]) -> list[int]:
        """Up to `most` tokens that may follow, none where nothing fits. `worth` tells how many guesses pay, given the
        chance of each that it and all before it are right."""
        offered, self.offered = self.offered, []
        if most <= 0:  # what is said meanwhile is taken in once guesses are asked for
            return []
        self.is_from_model = self.wants(tokens)
        if self.is_from_model:
            return offered[:most]
        guess: list[int] = []
        for place in range(self._place, self._place + worth(_Chances(self, min(most, MAX_DRAFT)))):
            # Past the end the guess itself goes on, as a text that repeats does.
            guess.append(tokens[place] if place < len(tokens) else guess[place - len(tokens)])
        return guess

    def _follow(self, tokens: Sequence[int]) -> None:
        """Take in what was said since."""
        known = len(self._earlier) - 1
        if not known:  # a prompt: what stands in it is looked up once, at its end
            for end in range(1, len(tokens)):
                self._keep(tokens, end)
            known = max(0, len(tokens) - 1)
        for end in range(known + 1, len(tokens) + 1):
            if self._length:
                self._settle(is_right := tokens[self._place] == tokens[end - 1])
            else:
                is_right = False
            if is_right:  # no other run can be longer: it would have been before
                self._place, self._length = self._place + 1, self._length + 1
            else:
                self._find(tokens, end)
            self._keep(tokens, end)

    def _settle(self, is_right: bool) -> None:
        kind = _kind(self._length)
        self._right[kind] = FORGETTING * self._right[kind] + is_right
        self._tried[kind] = FORGETTING * self._tried[kind] + 1

    def _find(self, tokens: Sequence[int], end: int) -> None:
        """The longest run that ends here and stood there before; of equally long ones the last."""
        self._place, self._length = self._behind_one.get(tokens[end - 1], 0), 0
        if self._place:
            self._length = 1
        place = self._behind_two.get(_pair(tokens, end), 0)
        for _ in range(MOST_PLACES):
            if not place or self._length == LONGEST_RUN:
                break
            length = 2
            while length < min(place, LONGEST_RUN) and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > self._length:
                self._place, self._length = place, length
            place = self._earlier[place]

    def _keep(self, tokens: Sequence[int], end: int) -> None:
        self._behind_one[tokens[end - 1]] = end
        pair = _pair(tokens, end)
        self._earlier.append(self._behind_two.get(pair, 0))
        self._behind_two[pair] = end


class _Chances(Collection[float]):
    """Chances of the next `count` guesses that each and all before it are right, worked out as far as is asked."""

    def __init__(self, drafter: Drafter, count: int) -> None:
        self._drafter, self._count = drafter, count

    def __len__(self) -> int:
        return self._count

    def __contains__(self, chance: object) -> bool:
        return any(chance == own for own in self)

    def __iter__(self) -> Iterator[float]:
        length, rates, chance = self._drafter.run_length, self._drafter.rates, 1.0
        for at in range(length, length + self._count):
            chance *= rates[_kind(at)]
            yield chance


def _pair(tokens: Sequence[int], end: int) -> tuple[int, ...]:
    return tuple(tokens[max(0, end - 2) : end])


def _kind(length: int) -> int:
    """Runs of 1, 2, 4, 8, 16 tokens and more."""
    return min(length.bit_length(), len(USUAL_CHANCES)) - 1
