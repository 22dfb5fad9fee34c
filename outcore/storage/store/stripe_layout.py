"""`StripeLayout`: one run of bytes dealt out over several files, stripe by stripe, as RAID 0 does.

A tensor of several stripes thus uses all drives at once. With one file every range is one piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outcore.common.quantities import round_up


@dataclass(frozen=True)
class StripeLayout:
    """Byte ranges of the store -> byte ranges of its files."""

    num_files: int
    stripe_bytes: int
    """Bytes in a row on one file; whole blocks of a drive."""

    def pieces(self, start: int, n_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(file number, offset in that file, bytes) of [start, start + n_bytes), in order."""
        if self.num_files == 1:
            if n_bytes:
                yield 0, start, n_bytes
            return
        end = start + n_bytes
        while start < end:
            stripe, inside = divmod(start, self.stripe_bytes)
            row, file = divmod(stripe, self.num_files)
            take = min(self.stripe_bytes - inside, end - start)
            yield file, row * self.stripe_bytes + inside, take
            start += take

    def file_sizes(self, total_bytes: int) -> list[int]:
        """Bytes of each file that together hold `total_bytes`, whole stripes where there are several files."""
        if self.num_files == 1:
            return [total_bytes]
        rows, rest = divmod(round_up(total_bytes, self.stripe_bytes) // self.stripe_bytes, self.num_files)
        return [(rows + (number < rest)) * self.stripe_bytes for number in range(self.num_files)]
