"""One measured rate, and the loop that measures it. Rates are GB/s (10**9 bytes); blocks and amounts are bytes.

What the CPU can stream through its own memory: the STREAM triad, a = b + s * c, over several thread counts.

The CPU optimizer lives off this number. Bytes are counted as STREAM counts them: two reads and one write per element,
without the read that a write-allocate cache adds. Cost: 3 arrays of 512 MiB each (where RAM is short 64 MiB) and a
quarter second per thread count. The size matters: measured on an H200's host, 377 GB/s with arrays of 64 MiB and
180 GB/s with large ones. The likely cause, which was not isolated: server CPUs have caches of 300 MB and more, in which
the smaller arrays stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from outcore.common.quantities import GB, GIB, MIB

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
    """Way of the transfer: 'posix', 'kvikio', 'default', 'write-combined', 'pageable', 'lanes', 'triad'."""
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


ARRAY_BYTES, SMALL_ARRAY_BYTES = 512 * MIB, 64 * MIB
ROOMY_BYTES = 8 * GIB
"""Available RAM from which the large arrays are used."""


def thread_counts(cores: int, threads: int) -> list[int]:
    """1, 2, 4 ... up to the cores, the cores themselves, and all hardware threads."""
    counts = {1, max(1, cores), max(1, threads)}
    power = 2
    while power < cores:
        counts.add(power)
        power *= 2
    return sorted(counts)


def measure_ram(counts: list[int], stage_s: float, most_s: float, array_bytes: int | None = None) -> list[Measurement]:
    """One triad per thread count. torch's thread count is as before afterwards."""
    import torch  # takes seconds

    if array_bytes is None:
        array_bytes = ARRAY_BYTES if psutil.virtual_memory().available >= ROOMY_BYTES else SMALL_ARRAY_BYTES
    n_elements = array_bytes // 4
    b, c = torch.full((n_elements,), 1.0), torch.full((n_elements,), 2.0)
    out = torch.empty(n_elements)
    before = torch.get_num_threads()
    limit_s = min(most_s, stage_s / max(1, len(counts)))
    found = []

    def step() -> int:
        torch.add(b, c, alpha=3.0, out=out)
        return 3 * array_bytes

    try:
        for count in counts:
            torch.set_num_threads(count)
            step()
            moved_bytes, elapsed_s = timed(step, limit_s)
            found.append(Measurement("ram", "cpu", "triad", array_bytes, count, moved_bytes, elapsed_s))
    finally:
        torch.set_num_threads(before)
    if float(out[0]) != 7.0 or float(out[-1]) != 7.0:
        raise RuntimeError(f"the memory test computed {float(out[0])} where 7 is right: this RAM or CPU is not healthy")
    return found
