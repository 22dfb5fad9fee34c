"""How many slots of the state ring keep a chunk from one pass to the next: one rule, for the ring and the planner."""

from __future__ import annotations

FLOWING_SHARE = 16
"""One slot in so many, and at least one, keeps none: what is not kept flows through these at the end of a pass."""


def kept_slots(num_slots: int) -> int:
    """Of `num_slots`, in a ring whose passes go to and fro."""
    return max(0, num_slots - max(1, num_slots // FLOWING_SHARE))
