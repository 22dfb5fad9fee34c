"""What the CPU can stream through its own memory: the STREAM triad, a = b + s * c, over several thread counts.

The CPU optimizer lives off this number. Bytes are counted as STREAM counts them: two reads and one write per element,
without the read that a write-allocate cache adds. Cost: 3 arrays of 512 MiB each (where RAM is short 64 MiB) and a
quarter second per thread count. The size matters: measured on an H200's host, 377 GB/s with arrays of 64 MiB and
180 GB/s with large ones. The likely cause, which was not isolated: server CPUs have caches of 300 MB and more, in which
the smaller arrays stay."""

from __future__ import annotations

import psutil
import torch

from outcore.common.quantities import GIB, MIB
from outcore.probe.bench.measurement import Measurement, timed

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
