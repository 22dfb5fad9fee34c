"""Slots of the state ring, and which chunks stay in them from one pass to the next: one rule, for ring and planner."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.common.quantities import round_up

BLOCK_BYTES = 4096
"""Bytes of a block of the drive."""
FLOWING_SHARE = 16
"""One slot in so many, and at least one, keeps none: what is not kept flows through these at the end of a pass."""
NEVER, WHOLE_SLOT = 0, 64
LEAST_MATRICES = 2
"""Slots for Muon's matrices: one is updated while the next is read."""
FLOWING_SLOTS = 24
"""Slots that keep a drive busy in both directions while updates go on. More are for keeping chunks, and for reading
ahead."""


def needed_in_slot(states_bytes: int, param_bytes: int = 0, grad_bytes: int = 0) -> int:
    """Bytes that a chunk takes of a slot: each of these in whole blocks, 0 of what has a home in RAM."""
    return sum(round_up(n_bytes, BLOCK_BYTES) for n_bytes in (states_bytes, param_bytes, grad_bytes))


def slot_count(num_chunks: int, chunks_bytes: int, slot_bytes: int, ring_bytes: int, max_slots: int) -> int:
    """Number of slots of a ring for `num_chunks` of `chunks_bytes` together: what `ring_bytes` gives, `max_slots` at
    most. Beyond
    `FLOWING_SLOTS` no more than hold all of them at once, since a slot is as large as the largest chunk."""
    enough = max(FLOWING_SLOTS, -(-chunks_bytes // slot_bytes))
    return min(max_slots, num_chunks, ring_bytes // slot_bytes, enough)


def kept_slots(num_slots: int) -> int:
    """Slots of `num_slots` that keep a chunk, in a ring whose passes go to and fro."""
    return max(0, num_slots - max(1, num_slots // FLOWING_SHARE))


def worth_keeping(n_bytes: int, slot_bytes: int) -> int:
    """Worth of keeping a chunk: a slot that it fills less than half moves more when others that fill it stay. Larger
    is better."""
    return WHOLE_SLOT - (slot_bytes // n_bytes).bit_length()


def kept_places(worths: Sequence[int], num_slots: int) -> list[int]:
    """Positions of the chunks to keep, in the order of a pass: highest worth first, on a tie the later one, which
    the next pass takes first; none that is worth `NEVER`."""
    counts = kept_counts([(worth, 1) for worth in worths], kept_slots(num_slots))
    return [place for place, count in enumerate(counts) if count]


def kept_counts(runs: Sequence[tuple[int, int]], num_kept: int) -> list[int]:
    """Count, in each run of equal chunks (worth, number), those that are among the `num_kept`."""
    counts, left = [0] * len(runs), num_kept
    for place in sorted(range(len(runs)), key=lambda place: runs[place][0])[::-1]:
        worth, count = runs[place]
        if worth == NEVER or not left:
            break
        counts[place] = min(count, left)
        left -= counts[place]
    return counts
