"""Memory that every rank of a host maps: one copy for all of them, pinned by each on its own GPU.

The segment is an anonymous file in RAM (memfd): it has no name, and is gone when the last rank is. Rank 0 makes it, the
others open it through rank 0's descriptor while that waits for them. Pages become real where they are first written."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outcore.common.quantities import format_gib, round_up
from outcore.staging.pool.allocator import ALIGNMENT_BYTES
from outcore.staging.pool.cuda_runtime import CudaRuntime, PinRefused
from outcore.staging.pool.host_memory import spread_pinned
from outcore.staging.pool.slab import HUGE_PAGE_BYTES

logger = logging.getLogger(__name__)

Exchange = Callable[[Any], list[Any]]
"""Gives each rank what every rank gave, in order of rank (an all-gather of plain values)."""


class SharedSegment:
    """`size_bytes` of zeros that all ranks map. Made on every rank at once; RuntimeError where the system has no memfd
    or a rank cannot open it."""

    def __init__(self, size_bytes: int, rank: int, exchange: Exchange) -> None:
        self.size_bytes = max(1, round_up(size_bytes, ALIGNMENT_BYTES))
        descriptor, error = -1, ""
        if rank == 0:
            try:
                descriptor = _make(self.size_bytes)
            except (OSError, AttributeError) as refused:
                error = f"{type(refused).__name__}: {refused}"
        pid, theirs, size, refused_0 = exchange((os.getpid(), descriptor, self.size_bytes, error))[0]
        try:
            if refused_0:
                raise RuntimeError(f"memory shared by ranks needs memfd_create (Linux): {refused_0}")
            if size != self.size_bytes:
                error = f"rank {rank} expected {self.size_bytes} shared bytes, rank 0 has {size}"
            elif rank:
                try:
                    descriptor = os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
                except OSError as refused:
                    error = f"rank {rank} cannot open the memory of rank 0 (process {pid}): {refused}"
            mapping = mmap.mmap(descriptor, self.size_bytes) if not error else None
            problems = [found for found in exchange(error) if found]
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if problems or mapping is None:
            raise RuntimeError(f"the ranks of this host cannot share memory: {problems[0]}")
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # kernels without huge pages for shared memory: small pages hold the same bytes
        self._mapping = mapping
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=self.size_bytes)

    def at(self, offset_bytes: int, n_bytes: int) -> torch.Tensor:
        """uint8 [n_bytes]."""
        return self.tensor[offset_bytes : offset_bytes + n_bytes]

    def offset_of(self, memory: torch.Tensor) -> int:
        """Offset where `memory`, a piece of it, begins: the same number on every rank."""
        offset = memory.data_ptr() - self.address
        assert 0 <= offset <= self.size_bytes, "not a piece of this segment"
        return offset


def _make(size_bytes: int) -> int:
    descriptor = os.memfd_create("outcore-ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def shared_bytes(sizes_bytes: Sequence[int]) -> int:
    """Room for pieces of these sizes, taken in whatever order."""
    return sum(_room(n_bytes) for n_bytes in sizes_bytes)


def _room(n_bytes: int) -> int:
    """Large pieces begin on huge pages."""
    return round_up(n_bytes, HUGE_PAGE_BYTES if n_bytes >= HUGE_PAGE_BYTES else ALIGNMENT_BYTES) + (
        HUGE_PAGE_BYTES if n_bytes >= HUGE_PAGE_BYTES else 0
    )


class SharedHomes:
    """Hands out pieces of a segment as `HostMemory` does of private RAM: the same pieces in the same order on every
    rank, so each finds the others' bytes where its own are. Nothing is given back before the end.

    `pin_bytes`: how much may be pinned, the same on all ranks; `runtime` None: nothing is. What CUDA refuses on a rank
    stays pageable there, and flows through its lanes' slots: slower, with the same bytes."""

    def __init__(self, segment: SharedSegment, pin_bytes: int, runtime: CudaRuntime | None) -> None:
        self.segment = segment
        self._runtime = runtime
        self._left_to_pin_bytes = pin_bytes if runtime is not None else 0
        self._used_bytes = 0
        self._registered: list[int] = []
        self._refused = False
        self.pinned_bytes = self.pageable_bytes = 0

    def take(self, n_bytes: int, owner: str, *, pinned: bool = True, touch: bool = True) -> torch.Tensor:
        """1-D uint8 of `n_bytes`, zero until a rank writes."""
        if n_bytes >= HUGE_PAGE_BYTES:
            self._used_bytes = round_up(self._used_bytes, HUGE_PAGE_BYTES)
        offset = self._used_bytes
        self._used_bytes += round_up(n_bytes, ALIGNMENT_BYTES)
        if self._used_bytes > self.segment.size_bytes:
            raise RuntimeError(
                f"{owner}: the shared memory of {format_gib(self.segment.size_bytes)} is too small by "
                f"{self._used_bytes - self.segment.size_bytes} bytes; its size was computed wrongly"
            )
        memory = self.segment.at(offset, n_bytes)
        room = round_up(n_bytes, ALIGNMENT_BYTES)
        is_pinned = False
        if pinned and n_bytes and room <= self._left_to_pin_bytes:
            self._left_to_pin_bytes -= room
            is_pinned = self._pin(offset, room, owner)
        if is_pinned:
            self.pinned_bytes += n_bytes
        else:
            self.pageable_bytes += n_bytes
        return memory

    def _pin(self, offset: int, n_bytes: int, owner: str) -> bool:
        assert self._runtime is not None
        if self._refused:
            return False
        try:
            self._runtime.register(self.segment.address + offset, n_bytes)
        except PinRefused as refusal:
            self._refused = True
            logger.warning("%s and what follows stay pageable on this rank: %s", owner, refusal)
            return False
        self._registered.append(self.segment.address + offset)
        return True

    def which_pinned(self, sizes: Sequence[tuple[int, int]]) -> frozenset[int]:
        """Choose as `HostMemory.which_pinned`."""
        return spread_pinned(sizes, self._left_to_pin_bytes)

    def close(self) -> None:
        """Unpin. The memory goes with the last tensor over it, here and on the other ranks."""
        registered, self._registered = self._registered, []
        try:
            if registered and self._runtime is not None:
                self._runtime.synchronize()
                for address in registered:
                    self._runtime.unregister(address)
        except RuntimeError as error:  # after a fatal CUDA error nothing can be unpinned; the process is to end
            logger.warning("shared memory could not be unpinned: %s", error)
