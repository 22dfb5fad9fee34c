"""The simulator itself: fixed seeds, replay, and that planted bugs and faults that it found are found."""

from __future__ import annotations

import secrets
import time

import pytest

from tests.simulation.planted import PACKAGE, bugs, functions_by_file, try_bug
from tests.simulation.planted_texts import CHANGED, FILES
from tests.simulation.run import WORLDS, run_seed, seed_of

CI_SECONDS = 60.0
FAULTS = [
    ("staging/lanes/driver.py", "copy.is_over"),
    pytest.param("staging/lanes/driver.py", "self._cancelled is not None", marks=pytest.mark.more),
    pytest.param("infer/cache/kept.py", "except OSError", marks=pytest.mark.more),
]
"""Faults that are put back. A copy whose end nobody asks the device about, so that its slot is filled while it is
read; and faults that the simulator has found: a lane that was closed waited for a gate that nobody opens any more; a
full drive ended every answer where it was to end keeping prompts only."""


@pytest.mark.parametrize("seed", range(2 * len(WORLDS)))
def test_a_seed_holds(seed):
    outcome = run_seed(seed)
    assert outcome.error is None, outcome.words()


@pytest.mark.parametrize("world", WORLDS)
def test_a_seed_replays(world):
    first, again = run_seed(seed_of(world, 4)), run_seed(seed_of(world, 4))
    assert (first.steps, first.trace, first.struck) == (again.steps, again.trace, again.struck)


@pytest.mark.parametrize("file, words", FAULTS)
def test_a_planted_bug_is_found(file, words):
    found = bugs({world: set() for world in WORLDS})
    bug = next(bug for bug in found if bug.file == file and words in bug.words)
    verdict = try_bug(bug, functions_by_file(), 60.0)
    assert verdict.seed is not None, verdict


def test_what_is_planted_is_in_the_product():
    assert set(CHANGED) <= set(FILES)
    for file, texts in CHANGED.items():
        for old, new in texts:
            assert old != new and old.count("\n") == new.count("\n"), f"{file}: {old!r} moves lines"
            assert (PACKAGE / file).read_text().count(old) == 1, f"{file} no longer has {old!r}"


@pytest.mark.more
def test_new_seeds_hold(capsys):
    """So long a time, and whatever fits into it: the count is no check."""
    seed, until_s = secrets.randbelow(10**9), time.monotonic() + CI_SECONDS
    with capsys.disabled():
        print(f"\nseeds from {seed} (python -m tests.simulation --seed N shows one again)")
    while time.monotonic() < until_s:
        outcome = run_seed(seed)
        assert outcome.error is None, outcome.words()
        seed += 1
