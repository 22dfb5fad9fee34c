"""Waiting for what another thread or process does soon."""

import time
from collections.abc import Callable
from typing import Any


def until(truth: Callable[[], Any], seconds: float = 120.0) -> Any:
    """What `truth` gives as soon as it is true; fails when that takes longer."""
    end_s = time.monotonic() + seconds
    while not (found := truth()):
        assert time.monotonic() < end_s, "it did not come to that"
        time.sleep(0.005)
    return found
