"""The extent allocator: exact, aligned, never overlapping, one free extent again when all is given back."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.common.quantities import round_up
from outcore.staging.pool.allocator import ALIGNMENT_BYTES, ExtentAllocator, PoolExtent
from tests.refused import refused

CAPACITY_BYTES = 64 * ALIGNMENT_BYTES


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * ALIGNMENT_BYTES)), max_size=80))
def test_any_mix_of_takes_and_returns_keeps_extents_apart_and_merges_at_the_end(steps: list[tuple[bool, int]]) -> None:
    allocator = ExtentAllocator(CAPACITY_BYTES)
    taken: list[PoolExtent] = []
    for give_back, number in steps:
        if give_back and taken:
            allocator.give_back(taken.pop(number % len(taken)))
        else:
            fit_bytes = allocator.best_fit_bytes(number)
            smallest = min(
                (e.size_bytes for e in allocator.free_extents if e.size_bytes >= round_up(number, 4096)), default=None
            )
            assert fit_bytes == smallest
            extent = allocator.take(number)
            assert (extent is None) == (fit_bytes is None)
            if extent is not None:
                assert extent.start_bytes % ALIGNMENT_BYTES == 0
                assert extent.size_bytes == round_up(number, ALIGNMENT_BYTES)  # never a power of two
                taken.append(extent)
        everything = sorted([*taken, *allocator.free_extents])
        position = 0
        for extent in everything:  # the extents tile the slab: no overlap, no gap
            assert extent.start_bytes == position
            position = extent.end_bytes
        assert position == CAPACITY_BYTES
        free = allocator.free_extents
        assert all(a.end_bytes < b.start_bytes for a, b in pairwise(free))  # neighbours are merged
        assert allocator.free_bytes == sum(e.size_bytes for e in free)
        assert allocator.largest_free_bytes == max((e.size_bytes for e in free), default=0)
    for extent in taken:
        allocator.give_back(extent)
    assert allocator.free_extents == (PoolExtent(0, CAPACITY_BYTES),)


def test_double_and_foreign_returns_and_bad_sizes_are_refused() -> None:
    allocator = ExtentAllocator(CAPACITY_BYTES)
    extent = allocator.take(1)
    assert extent is not None
    allocator.give_back(extent)
    refused(ValueError, "released twice", lambda: allocator.give_back(extent))
    refused(ValueError, "not taken", lambda: allocator.give_back(PoolExtent(8192, 4096)))
    refused(ValueError, "positive size", lambda: allocator.take(0))
    refused(ValueError, "multiple of 4096", lambda: ExtentAllocator(5000))
