"""Guesses: from the text itself, longer while right, paused when wrong, only where they pay."""

from __future__ import annotations

import pytest

from outcore.infer.schedule import Drafter, PassCost


def test_what_followed_before_is_guessed():
    drafter = Drafter()
    assert drafter.propose([5, 6, 7, 8, 9, 1, 5, 6], 3) == [7, 8, 9]
    assert Drafter().propose([1, 2, 3, 4], 3) == []
    assert drafter.propose([5, 6, 7, 8, 9, 1, 5, 6, 9, 9], 3) == []


def test_guesses_grow_while_right_and_pause_when_wrong():
    drafter, tokens = Drafter(), [1, 2, 3, 4, 5, 6, 7, 8, 9] * 6
    first = drafter.propose(tokens, 64)
    drafter.learn_from(len(first), len(first), len(tokens))
    assert len(drafter.propose(tokens, 64)) == 2 * len(first)
    for _ in range(2):
        drafter.learn_from(4, 0, len(tokens))
    assert drafter.propose(tokens, 64) == []
    assert drafter.propose(tokens + tokens[:18], 64)


def test_measured_cost_decides():
    travelling, computing = PassCost(), PassCost()
    for rows in (1, 5, 9, 2, 7):
        travelling.add(rows, 1.0 + 0.001 * rows)
        computing.add(rows, 0.01 + 0.1 * rows)
    assert travelling.share_of_row() == pytest.approx(0.001, rel=0.1)
    assert travelling.longest_draft(0.5, 20) >= 8
    assert computing.longest_draft(0.5, 20) == 0
    assert PassCost().longest_draft(0.1, 5) == 5  # unknown: try
