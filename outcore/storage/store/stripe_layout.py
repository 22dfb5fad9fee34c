"""`StripeLayout`: one run of bytes dealt out over several files, stripe by stripe, as RAID 0 does.

A tensor of several stripes thus uses all drives at once. `pattern` says whose turn it is: (0, 1) for two equal drives,
(0, 1, 0) when drive 0 is twice as fast, so that both finish at the same time. With one file every range is one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outcore.common.quantities import round_up


@dataclass(frozen=True)
class StripeLayout:
    """Byte ranges of the store -> byte ranges of its files."""

    num_files: int
    stripe_bytes: int
    """Bytes in a row on one file; a multiple of `ALIGN_BYTES`."""
    pattern: tuple[int, ...]
    """File numbers of consecutive stripes; repeats."""
    header_bytes: int
    """Bytes at the start of each file that hold no tensors."""

    def __post_init__(self) -> None:
        if self.num_files < 1 or self.stripe_bytes < 1 or self.header_bytes < 0:
            raise ValueError(f"not a layout: {self}")
        if set(self.pattern) != set(range(self.num_files)):
            raise ValueError(f"the stripe pattern {self.pattern} must name each of {self.num_files} files")

    def pieces(self, start: int, n_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(file number, offset in that file, bytes) of [start, start + n_bytes), in order."""
        if self.num_files == 1:
            if n_bytes:
                yield 0, self.header_bytes + start, n_bytes
            return
        end = start + n_bytes
        while start < end:
            stripe, inside = divmod(start, self.stripe_bytes)
            cycle, place = divmod(stripe, len(self.pattern))
            file = self.pattern[place]
            row = cycle * self.pattern.count(file) + self.pattern[:place].count(file)
            take = min(self.stripe_bytes - inside, end - start)
            yield file, self.header_bytes + row * self.stripe_bytes + inside, take
            start += take

    def file_sizes(self, total_bytes: int) -> list[int]:
        """Bytes of each file that together hold `total_bytes`, whole stripes where there are several files."""
        if self.num_files == 1:
            return [self.header_bytes + total_bytes]
        stripes = round_up(total_bytes, self.stripe_bytes) // self.stripe_bytes
        cycles, rest = divmod(stripes, len(self.pattern))
        rows = [cycles * self.pattern.count(n) + self.pattern[:rest].count(n) for n in range(self.num_files)]
        return [self.header_bytes + row * self.stripe_bytes for row in rows]


def stripe_pattern(weights: Sequence[int]) -> tuple[int, ...]:
    """Interleave files in proportion to their weights: (2, 1) -> (0, 1, 0). Raises ValueError for weights below 1."""
    if not weights or any(not isinstance(weight, int) or weight < 1 for weight in weights):
        raise ValueError(f"drive weights must be whole numbers of at least 1, got {list(weights)}")
    # Each turn belongs at a fraction of the cycle; sorting the fractions spreads every file evenly.
    turns = [((turn + 0.5) / weight, file) for file, weight in enumerate(weights) for turn in range(weight)]
    return tuple(file for _, file in sorted(turns))
