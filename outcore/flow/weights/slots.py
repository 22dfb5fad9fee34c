"""Which device buffer each use of a slab gets, and when it may be overwritten: planned before a pass begins.

A pass uses units in a known order (embedding, layers up, head, layers down). For each use the plan picks, among the
buffers that the last `num_buffers` - 1 uses did not touch, the one whose content is needed latest (Belady), so that
copies go ahead by that many uses and the turning point at the head copies nothing twice. Pure; cost O(uses x buffers).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SlotUse:
    """One use of a slab."""

    buffer: int
    copy: bool
    """Whether it must be uploaded; otherwise it is still there."""
    free_after: int
    """The copy may begin when this use (its place in the sequence) is over; -1: at once."""


def plan_slots(sequence: Sequence[Hashable], num_buffers: int) -> list[SlotUse]:
    """A buffer for each use of `sequence` (keys of slabs). ValueError without buffers."""
    if num_buffers < 1:
        raise ValueError(f"streaming needs at least one device buffer per kind of unit, got {num_buffers}")
    next_use = _next_uses(sequence)
    content: list[Hashable | None] = [None] * num_buffers
    last_use = [-1] * num_buffers
    plan: list[SlotUse] = []
    for at, key in enumerate(sequence):
        if key in content:
            buffer = content.index(key)
            plan.append(SlotUse(buffer, False, -1))
        else:
            recent = {use.buffer for use in plan[max(0, at - num_buffers + 1) : at]}
            free = [b for b in range(num_buffers) if b not in recent]

            def needed(b: int, at: int = at) -> int:
                return len(sequence) + 1 if content[b] is None else next_use(content[b], at)

            buffer = max(free, key=needed)
            plan.append(SlotUse(buffer, True, last_use[buffer]))
            content[buffer] = key
        last_use[buffer] = at
    return plan


def _next_uses(sequence: Sequence[Hashable]):
    places: dict[Hashable, list[int]] = {}
    for at, key in enumerate(sequence):
        places.setdefault(key, []).append(at)

    def next_use(key: Hashable, after: int) -> int:
        return next((at for at in places[key] if at >= after), len(sequence))

    return next_use
