"""Two hundred streams at once: no error, no leak, none starves, no place is lost."""

import json
import subprocess
import sys

import pytest

from tests.forked import ROOT


@pytest.mark.slow
def test_two_hundred_streams():
    command = [sys.executable, "-m", "tests.serve.load", "--streams", "200", "--seconds", "60"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == 0 and found["places_not_given_back"] == 0 and found["left_in_the_middle"] > 0
    assert found["answers_of_the_stream_with_fewest"] > 0 and found["rss_growth"] < 0.05


@pytest.mark.slow
def test_three_hundred_slow_clients_hold_up_nobody():
    asked = [sys.executable, "-m", "tests.serve.load", "--streams", "20", "--slow", "300", "--seconds", "40"]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["first_word_ratio"]["median"] < 1.2 and found["first_word_ratio"]["p95"] < 1.2, found
