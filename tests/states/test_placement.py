"""Which chunks of states stay in RAM: within the budget, nothing wasted, spread evenly."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from outcore.states.placement import spread

SIZES = st.lists(st.integers(1, 50), max_size=60)


@given(SIZES, st.integers(0, 3000))
def test_ram_is_filled_as_far_as_it_goes(sizes, ram_bytes):
    in_ram = spread(sizes, ram_bytes)
    taken = sum(size for size, stays in zip(sizes, in_ram, strict=True) if stays)
    assert taken <= ram_bytes
    assert all(taken + size > ram_bytes for size, stays in zip(sizes, in_ram, strict=True) if not stays)


@given(SIZES, st.fractions(0, 1))
def test_every_stretch_has_its_share(sizes, share):
    total = sum(sizes)
    ram_bytes = int(share * total)
    in_ram = spread(sizes, ram_bytes)
    largest = max(sizes, default=0)
    so_far = [0]
    for size, stays in zip(sizes, in_ram, strict=True):
        so_far.append(so_far[-1] + (size if stays else 0))
    for start in range(len(sizes)):
        for stop in range(start + 1, len(sizes) + 1):
            fair = Fraction(ram_bytes, max(total, 1)) * sum(sizes[start:stop])
            assert abs(so_far[stop] - so_far[start] - fair) <= 2 * largest
