"""Slots of the state ring, and which chunks stay in them from one pass to the next: one rule, for ring and planner."""

from __future__ import annotations

from collections.abc import Sequence

FLOWING_SHARE = 16
"""One slot in so many, and at least one, keeps none: what is not kept flows through these at the end of a pass."""
NEVER, WHOLE_SLOT = 0, 64
FLOWING_SLOTS = 24
"""They keep a drive busy in both directions. More are for keeping chunks."""


def slot_count(num_chunks: int, chunks_bytes: int, slot_bytes: int, ring_bytes: int, max_slots: int) -> int:
    """Of a ring for `num_chunks` of `chunks_bytes` together: what `ring_bytes` gives, `max_slots` at most. Beyond
    `FLOWING_SLOTS` no more than hold all of them at once, since a slot is as large as the largest chunk."""
    enough = max(FLOWING_SLOTS, -(-chunks_bytes // slot_bytes))
    return min(max_slots, num_chunks, ring_bytes // slot_bytes, enough)


def kept_slots(num_slots: int) -> int:
    """Of `num_slots`, in a ring whose passes go to and fro."""
    return max(0, num_slots - max(1, num_slots // FLOWING_SHARE))


def worth_keeping(n_bytes: int, slot_bytes: int) -> int:
    """Of a chunk: a slot that it fills less than half moves more when others that fill it stay. Larger is better."""
    return WHOLE_SLOT - (slot_bytes // n_bytes).bit_length()


def kept_places(worths: Sequence[int], num_slots: int) -> list[int]:
    """Of chunks in the order of a pass: those of the most worth, of equal ones the last, which the next pass takes
    first; none that is worth `NEVER`."""
    places = sorted((place for place, worth in enumerate(worths) if worth), key=worths.__getitem__)
    return places[max(0, len(places) - kept_slots(num_slots)) :]
