"""Guesses: from the longest run of the text that stood there before, as many as pay by their record and by what passes
cost."""

from __future__ import annotations

import random

import pytest

from outcore.infer.schedule import Drafter, PassCost


@pytest.fixture(autouse=True)
def free_guesses():
    """Here they have their cost."""


def written(prompt, answer, seconds, worth=None) -> tuple[float, int]:
    """(seconds, passes) in which the answer is written, guesses and all; a pass of n rows takes seconds(n)."""
    cost, drafter, total, passes = PassCost(), Drafter(), 0.0, 0
    tokens, end = list(prompt), len(prompt) + len(answer)
    whole = [*prompt, *answer]
    while len(tokens) < end:
        guess = drafter.propose(tokens, end - len(tokens) - 1, worth or cost.worth)
        right = 0
        while right < len(guess) and guess[right] == whole[len(tokens) + right]:
            right += 1
        tokens = whole[: len(tokens) + right + 1]
        total, passes = total + seconds(1 + len(guess)), passes + 1
        cost.add(1 + len(guess), seconds(1 + len(guess)))
    return total, passes


def chances_of(drafter: Drafter, tokens, most: int = 4) -> list[float]:
    seen: list[float] = []

    def worth(chances) -> int:
        seen.extend(chances)
        return 0

    assert drafter.propose(tokens, most, worth) == []
    return seen


def test_what_followed_before_is_guessed():
    assert Drafter().propose([5, 6, 7, 8, 9, 1, 5, 6], 3, len) == [7, 8, 9]
    assert Drafter().propose([1, 2, 3, 4], 3, len) == []
    assert Drafter().propose([4], 3, len) == [] and Drafter().propose([4, 4], 3, len) == [4, 4, 4]
    # The longest run that stood there before counts, then the latest place.
    assert Drafter().propose([5, 6, 7, 8, 9, 6, 1, 5, 6], 2, len) == [7, 8]
    assert Drafter().propose([6, 7, 6, 8, 3, 6], 1, len) == [8]
    long = list(range(40))
    assert Drafter().propose([*long, 99, 38, 39, 7, 99, *long], 2, len) == [99, 38]


def test_a_run_goes_on_past_the_end():
    assert Drafter().propose([1, 2, 3] * 3, 7, len) == [1, 2, 3, 1, 2, 3, 1]


def test_a_text_that_comes_in_pieces_is_known_as_a_whole_one():
    generator = random.Random(3)
    tokens = [generator.randrange(12) for _ in range(300)]
    in_pieces = Drafter()
    for end in range(1, len(tokens), 7):
        assert in_pieces.propose(tokens[:end], 5, len) == Drafter().propose(tokens[:end], 5, len)


def test_chances_follow_the_record_whether_or_not_anything_is_guessed():
    drafter, tokens = Drafter(), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first = chances_of(drafter, tokens * 2)
    assert first == sorted(first, reverse=True) and len(first) == 4
    for count in range(2, 40):
        chances_of(drafter, tokens * count)
    assert chances_of(drafter, tokens * 40)[3] > max(0.9, first[3])
    wrong, text = Drafter(), [1, 2]
    before = chances_of(wrong, [1, 2, 1])[0]
    for other in range(3, 30):  # what followed 1 never comes again
        text += [1, other]
        chances_of(wrong, text)
    assert chances_of(wrong, [*text, 1])[0] < before / 2


def test_a_small_models_guesses_are_of_one_pass():
    drafter = Drafter(beside_model=True)
    drafter.offered = [7, 8]
    assert drafter.propose([1, 2, 3, 4], 0, len) == [] and drafter.offered == []
    drafter.offered = [7, 8]
    assert drafter.propose([1, 2, 3, 1, 2], 3, len) == [7, 8] and drafter.is_from_model
    assert drafter.propose([1, 2, 3, 9, 1, 2, 3], 1, len) == [9] and not drafter.is_from_model


def test_an_edited_text_takes_few_passes():
    generator = random.Random(1)
    text = [generator.randrange(1000) for _ in range(240)]
    edited = list(text)
    for place in (60, 120, 180):
        edited[place] = 2000
    _, passes = written(text, edited, lambda rows: 1 + 0.0002 * rows)
    assert passes < 24


@pytest.mark.parametrize("of_row", [0.0, 0.02, 0.1, 0.5])
def test_other_text_is_hardly_slower(of_row):
    generator = random.Random(2)
    words = [int(generator.paretovariate(0.9)) % 5000 for _ in range(1200)]  # some words are frequent, as in a story
    seconds, _ = written(words[:200], words[200:], lambda rows: 1 + of_row * (rows - 1))
    assert seconds < 1.05 * 1000


def test_measured_cost_decides():
    travelling, computing, steps = PassCost(), PassCost(), PassCost()
    for rows in (1, 5, 9, 2, 7, 20):
        travelling.add(rows, 1.0 + 0.0001 * rows)
        computing.add(rows, 0.01 + 0.1 * rows)
        steps.add(rows, 1.0 if rows <= 4 else 2.0)
    likely = [0.9**n for n in range(1, 64)]
    assert travelling.worth(likely) > 40 and computing.worth([0.8 * chance for chance in likely]) == 0
    assert steps.worth([0.5, 0.25, 0.1, 0.05]) == 1 and steps.worth(likely) > 16  # little, or as much as goes
    assert 4 < PassCost().worth(likely) < 30  # unknown: try
    assert travelling.seconds_of(3) == pytest.approx(1.0003) and PassCost().seconds_of(3) is None
    # Beside many answers a row has to bring more than one of them costs.
    assert travelling.worth([0.9] * 3, rows=20) == 3 and computing.worth([0.9] * 3, rows=20) == 0


def test_the_quickest_of_the_last_passes_of_a_size_counts():
    cost = PassCost()
    for seconds in (9.0, 1.0, 5.0, 5.0):
        cost.add(1, seconds)
    assert cost.seconds_of(1) == 1.0
    for _ in range(4):
        cost.add(1, 3.0)
    assert cost.seconds_of(1) == 3.0
    cost.add(5000, 100.0)  # a prompt was read
    assert cost.seconds_of(1) == 3.0
    cost.add(8, 30.0)
    for _ in range(600):
        cost.add(1, 3.0)
    assert cost.seconds_of(8) < 30.0
