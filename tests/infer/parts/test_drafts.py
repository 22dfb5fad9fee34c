"""Guesses: from the text itself, as long as they come true, only where they pay."""

from __future__ import annotations

import pytest

from outcore.infer.schedule import Drafter, PassCost


def test_what_followed_before_is_guessed():
    drafter = Drafter()
    assert drafter.propose([5, 6, 7, 8, 9, 1, 5, 6], 3) == [7, 8, 9]
    assert Drafter().propose([1, 2, 3, 4], 3) == []
    # The longest run that stood there before counts, then the latest place.
    assert Drafter().propose([5, 6, 7, 8, 9, 6, 1, 5, 6], 2) == [7, 8]
    assert Drafter().propose([6, 7, 6, 8, 3, 6], 1) == [8]


def test_guesses_are_as_long_as_they_come_true():
    drafter, tokens = Drafter(), [1, 2, 3, 4, 5, 6, 7, 8, 9] * 6
    first = drafter.propose(tokens, 64)
    drafter.learn_from(len(first), len(first))
    longer = drafter.propose(tokens, 64)
    assert len(longer) > len(first)
    for _ in range(4):
        drafter.learn_from(len(longer), 0)
    assert len(drafter.propose(tokens, 64)) < len(first)
    assert drafter.propose(tokens, 0) == []


def test_a_small_models_guesses_are_of_one_pass():
    drafter = Drafter(beside_model=True)
    drafter.offered = [7, 8]
    assert drafter.propose([1, 2, 3, 4], 0) == [] and drafter.offered == []


def test_guesses_that_do_not_pay_are_tried_again_later():
    drafter, tokens = Drafter(), [1, 2, 3] * 6
    drafter.learn_from(4, 0)
    found = [len(drafter.propose(tokens, 8, 0.4)) for _ in range(12)]
    assert found[0] == 0 and found[-1] > 0


def test_measured_cost_decides():
    travelling, computing = PassCost(), PassCost()
    for rows in (1, 5, 9, 2, 7):
        travelling.add(rows, 1.0 + 0.001 * rows)
        computing.add(rows, 0.01 + 0.1 * rows)
    assert travelling.share_of_row() == pytest.approx(0.001, rel=0.1)
    tokens = [1, 2, 3] * 6
    assert len(Drafter().propose(tokens, 20, travelling.share_of_row())) >= 8
    assert Drafter().propose(tokens, 20, computing.share_of_row()) == []
    assert len(Drafter().propose(tokens, 5, PassCost().share_of_row())) == 5  # unknown: try
