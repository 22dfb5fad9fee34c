"""Copies between pageable RAM and pinned slots: threads that do them, and what rate they reach together."""

from __future__ import annotations

from outcore.sizing.streaming import PAGEABLE_SLOTS

COPY_THREAD_GB_PER_S = 2.5
"""Rate of one thread's memcpy into a pinned slot: four threads gave about 10 GB/s beside a running pass on servers
with one H100 and one H200 (half of LoRA's base of 8 B pageable: 16 GB in 1.6 of 1.9 to 2.3 s, November 2026)."""
NOT_SLOWER_SHARE = 0.97
"""Share of default memory's rate from which write-combined memory counts as not slower: two measurements of one kind
differ by as much."""
DRAM_PASSES = 3
"""A copied byte is read, written, and read again by the device."""


MOST_COPY_THREADS = 3 * PAGEABLE_SLOTS // 4
"""A quarter of the slots is on its way while the others are filled: with 16 slots 12 threads reached 35.4 GB/s, 16
threads 27.2 (one H100, 32 cores, a third of DRAM 35.8)."""


def copy_threads(cores: int) -> int:
    """Threads of one lane: half of the usable cores, at least 4 where there are so many; the rest update and launch."""
    return max(1, min(max(4, cores // 2), cores, MOST_COPY_THREADS))


def copies_gb_per_s(cores: int, ram_gb_per_s: float) -> float:
    """What a lane can take from pageable RAM: its threads' rate, or a third of DRAM's."""
    return min(copy_threads(cores) * COPY_THREAD_GB_PER_S, ram_gb_per_s / DRAM_PASSES)
