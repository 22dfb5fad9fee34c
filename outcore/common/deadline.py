"""Limits of waits, and one limit for several waits, one after another, while an engine is closed or a
failed pass is given up."""

from __future__ import annotations

import time

TIMEOUT_S = 600.0
"""Longest wait for work that is under way: a slow drive needs under a minute for the largest layer, a GPU far less, so
more means that something hangs."""
CLOSE_TIMEOUT_S = 60.0
"""Limit for closing an engine: a drive that works has written its few buffers by then; for one that hangs it is
enough."""
GRACE_S = 0.5
"""Seconds that every wait gets all the same: something that has just ended may not have said so."""


class Deadline:
    """`seconds` from now on, for all waits together."""

    def __init__(self, seconds: float = CLOSE_TIMEOUT_S) -> None:
        self._until_s = time.monotonic() + seconds

    def left_s(self) -> float:
        """For the next wait; at least `GRACE_S`."""
        return max(GRACE_S, self._until_s - time.monotonic())

    def expire(self) -> None:
        """Something hangs, and the others had as long as it: each of them gets `GRACE_S`."""
        self._until_s = 0.0


def after(error: BaseException) -> Deadline | None:
    """For the waits that `error` in mid-pass leads to; None: their own limits. After a wait that was in vain, or when
    somebody wants to stop at once, nothing is waited for: whoever is to read the reason would wait, too."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, TimeoutError) or not isinstance(at, Exception):
            return Deadline(0.0)
        at = at.__cause__
    return None
