"""One measured rate, and the loop that measures it. Rates are GB/s (10**9 bytes); blocks and amounts are bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outcore.common.quantities import GB

Clock = Callable[[], float]

# A setting whose rate is within 3 % of the best is as good; the smallest such block and depth leaves the most room.
GOOD_ENOUGH = 0.97


@dataclass(frozen=True)
class Measurement:
    """A link at one setting."""

    link: str
    """One of `report.record.LINKS`."""
    target: str
    """The directory or the device: '/data', 'cuda:0', 'cuda:0 -> cuda:1', 'cpu'."""
    engine: str
    """How: 'posix', 'kvikio', 'default', 'write-combined', 'pageable', 'lanes', 'triad'."""
    block_bytes: int
    depth: int
    """Requests in flight (threads for ram)."""
    moved_bytes: int
    elapsed_s: float

    @property
    def gb_per_s(self) -> float:
        """Bytes moved over time taken."""
        return self.moved_bytes / self.elapsed_s / GB if self.elapsed_s > 0 else 0.0


def timed(step: Callable[[], int], limit_s: float, max_bytes: int | None = None, clock: Clock = time.perf_counter):
    """Repeats `step` (which returns the bytes it moved) until the time or the bytes are used up, at least once.

    Returns (bytes, seconds). The last step is never cut short, so a slow link takes longer than `limit_s`."""
    moved_bytes, start_s = 0, clock()
    while True:
        moved_bytes += step()
        elapsed_s = clock() - start_s
        if elapsed_s >= limit_s or (max_bytes is not None and moved_bytes >= max_bytes):
            return moved_bytes, elapsed_s


def best(measurements: Iterable[Measurement], **wanted: object) -> Measurement | None:
    """The fastest of those whose attributes equal `wanted`; None when there is none."""
    fitting = [m for m in measurements if all(getattr(m, name) == value for name, value in wanted.items())]
    return max(fitting, key=lambda m: m.gb_per_s, default=None)


def smallest_good_enough(measurements: Iterable[Measurement]) -> Measurement | None:
    """Choose of those within 3 % of the fastest the one that keeps the fewest bytes in flight; None when there is
    none."""
    known = list(measurements)
    if not known:
        return None
    bar = GOOD_ENOUGH * max(m.gb_per_s for m in known)
    return min((m for m in known if m.gb_per_s >= bar), key=lambda m: (m.block_bytes * m.depth, m.depth))
