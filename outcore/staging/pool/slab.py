"""Slabs: the few big blocks of host memory that the pool cuts its leases from.

`MappedSlab` is anonymous private memory, 2 MiB-aligned, on huge pages where the kernel allows, touched by several
threads and then, on a CUDA machine, pinned in place by cudaHostRegister: what is held is what was asked, to the page
(torch's own pin_memory rounds up to a power of two). `WriteCombinedSlab` comes from cudaHostAlloc. Both give a 1-D
uint8 torch tensor over the memory. Cost: about 0.3-0.5 s per GiB, once. Without CUDA the mapping is left pageable.

A forked child does not inherit the mapping (a DataLoader worker must not touch staging memory).

Lifetime: pinning ends at `close()`. The mapping itself goes when the last tensor over it is gone, so that a stray
tensor never points at nothing; write-combined memory belongs to the CUDA runtime and is freed at `close()`."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from outcore.common.quantities import MIB, format_gib, round_up
from outcore.machine import usable_cores
from outcore.staging.pool.allocator import ALIGNMENT_BYTES
from outcore.staging.pool.cuda_runtime import CudaRuntime, PinRefused
from outcore.staging.pool.pinned_grant import PinnedGrant

HUGE_PAGE_BYTES = 2 * MIB  # transparent huge pages of x86-64 and of arm64 with 4 KiB pages
TOUCH_STEP_BYTES = 8 * MIB
"""Four huge pages: a home of one chunk of states (tens of MiB) still keeps several threads busy."""
MAX_TOUCH_THREADS = 16
MIN_SLAB_BYTES = 64 * MIB
"""When CUDA refuses a slab it is halved down to this size before the rest is given up."""


class Slab(Protocol):
    """One block of host memory; `tensor` is 1-D uint8 of exactly `size_bytes`, starting on a page."""

    size_bytes: int
    tensor: torch.Tensor
    is_pinned: bool
    is_write_combined: bool

    def close(self) -> None: ...


class MappedSlab:
    """Anonymous memory of exactly `size_bytes` (a multiple of 4 KiB), pinned when a `runtime` is given.

    `touch` False leaves the pages to whoever writes them first: they read as zeros until then, and cost nothing.
    Raises MemoryError when the operating system refuses the mapping, PinRefused when CUDA refuses to pin it."""

    is_write_combined = False

    def __init__(self, size_bytes: int, runtime: CudaRuntime | None, *, touch: bool = True) -> None:
        self.size_bytes = size_bytes
        self.is_pinned = False
        self._runtime = runtime
        # Room to start on a huge page; the pages before the start are never touched and so cost nothing.
        slack_bytes = HUGE_PAGE_BYTES if size_bytes >= HUGE_PAGE_BYTES else 0
        try:
            mapping = _map_anonymous(size_bytes + slack_bytes)
        except OSError as error:
            raise MemoryError(f"the operating system refused to map {size_bytes} bytes: {error}") from error
        base_address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        start_bytes = -base_address % HUGE_PAGE_BYTES if slack_bytes else 0
        self.address = base_address + start_bytes
        if hasattr(mmap, "MADV_DONTFORK"):
            # A fork would make these pages copy-on-write, and a transfer under way would land in the wrong copy (see
            # O_DIRECT in open(2)); child processes have no business here.
            mapping.madvise(mmap.MADV_DONTFORK)
        # Only whole huge pages: the tail stays on small pages, so that no byte more than asked is held.
        whole_bytes = size_bytes - size_bytes % HUGE_PAGE_BYTES
        if slack_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE, start_bytes, whole_bytes)
            except OSError:
                pass  # a kernel without transparent huge pages: small pages hold the same bytes
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=size_bytes, offset=start_bytes)
        if touch or runtime is not None:
            self._touch(_touch_threads())
        if runtime is not None:
            runtime.register(self.address, size_bytes)
            self.is_pinned = True

    def _touch(self, num_threads: int) -> None:
        def fill(start_bytes: int) -> None:
            ctypes.memset(self.address + start_bytes, 0, min(TOUCH_STEP_BYTES, self.size_bytes - start_bytes))

        starts = range(0, self.size_bytes, TOUCH_STEP_BYTES)
        if len(starts) == 1:
            return fill(0)
        with ThreadPoolExecutor(min(num_threads, len(starts)), thread_name_prefix="slab-touch") as threads:
            list(threads.map(fill, starts))

    def close(self) -> None:
        """Unpins; the mapping goes with the last tensor over it. A second call does nothing."""
        if self.is_pinned and self._runtime is not None:
            self.is_pinned = False
            self._runtime.unregister(self.address)
        self.tensor = torch.empty(0, dtype=torch.uint8)


class WriteCombinedSlab:
    """Write-combined pinned memory of exactly `size_bytes`: fast for DMA and sequential CPU writes, ~2 GB/s to read.

    Raises PinRefused. No tensor over it may be used after `close()`."""

    is_write_combined = True

    def __init__(self, size_bytes: int, runtime: CudaRuntime) -> None:
        self.size_bytes = size_bytes
        self._runtime = runtime
        self.address = runtime.alloc_write_combined(size_bytes)
        self.is_pinned = True
        memory = (ctypes.c_uint8 * size_bytes).from_address(self.address)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Frees the memory. A second call does nothing."""
        if self.is_pinned:
            self.is_pinned = False
            self.tensor = torch.empty(0, dtype=torch.uint8)
            self._runtime.free_write_combined(self.address)


def build_slabs(slabs: list[Slab], notes: list[str], grant: PinnedGrant, runtime: CudaRuntime | None) -> None:
    """Fills `slabs` with what `grant` allows and `notes` with a sentence for everything that went otherwise.

    Without CUDA there is one kind of memory. Otherwise write-combined memory that is refused becomes default memory,
    a refused slab is tried in halves, and where nothing at all can be pinned pageable memory takes its place."""
    notes.extend(grant.reasons)
    if runtime is None:
        _add_mapped(slabs, notes, grant.total_bytes, grant.largest_piece_bytes, None)
        return
    pinned_bytes = grant.pinned_bytes
    if grant.write_combined_bytes:
        try:
            slabs.append(WriteCombinedSlab(grant.write_combined_bytes, runtime))
        except PinRefused as refusal:
            notes.append(f"no write-combined memory, default memory takes its place: {refusal}")
            pinned_bytes += grant.write_combined_bytes
    _add_mapped(slabs, notes, pinned_bytes, grant.largest_piece_bytes, runtime)
    if (pinned_bytes or grant.pageable_bytes) and all(slab.is_write_combined for slab in slabs):
        pageable_bytes = max(pinned_bytes, grant.pageable_bytes)
        _add_mapped(slabs, notes, pageable_bytes, pageable_bytes, None)
        notes.append(
            f"{format_gib(pageable_bytes)} of staging memory could not be pinned: transfers go through pageable "
            "memory, several times slower; close other programs, or on WSL2 raise the memory limit in .wslconfig"
        )


def _add_mapped(
    slabs: list[Slab], notes: list[str], total_bytes: int, largest_piece_bytes: int, runtime: CudaRuntime | None
) -> None:
    left_bytes, piece_bytes = total_bytes, max(largest_piece_bytes, ALIGNMENT_BYTES)
    while left_bytes:
        n_bytes = min(left_bytes, piece_bytes)
        try:
            slabs.append(MappedSlab(n_bytes, runtime))
            left_bytes -= n_bytes
        except (PinRefused, MemoryError) as refusal:
            if n_bytes <= MIN_SLAB_BYTES:
                notes.append(f"{format_gib(left_bytes)} less staging memory than planned: {refusal}")
                return
            piece_bytes = round_up(n_bytes // 2, ALIGNMENT_BYTES)


def _touch_threads() -> int:
    """Threads: as many as this process may run at once: giving pages out is bound by the cores that clear them."""
    return min(MAX_TOUCH_THREADS, usable_cores())


def _map_anonymous(n_bytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, n_bytes)  # Windows: page-file backed
