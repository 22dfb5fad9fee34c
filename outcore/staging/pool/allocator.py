"""Extents inside one slab: best fit over a sorted free list, neighbours merged the moment one is given back.

Purpose: sub-allocate a pinned slab without rounding sizes up to powers of two and without lasting fragmentation.
Algorithm: the free list is kept sorted by start; an allocation takes the smallest free extent that is big enough (the
lowest start among equals) and leaves the rest of it free; a release merges with the free neighbour on either side, so
that after the last release there is exactly one free extent again.
Cost: linear in the number of free extents (tens in practice); pure Python, no memory is touched.

A lease: exact bytes of staging memory with an owner's name on them, until released."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from outcore.common.quantities import format_gib, round_up

ALIGNMENT_BYTES = 4096
"""Start and length of every extent: the page size, and the largest logical block of today's drives (O_DIRECT)."""


class PoolExtent(NamedTuple):
    """A range of bytes inside a slab."""

    start_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + self.size_bytes


class ExtentAllocator:
    """Hands out 4 KiB-aligned extents of a slab of `capacity_bytes` (a multiple of 4 KiB). Not thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes <= 0 or capacity_bytes % ALIGNMENT_BYTES:
            raise ValueError(
                f"a slab must be a positive multiple of {ALIGNMENT_BYTES} bytes, got {capacity_bytes}; "
                "round the size up with units.round_up"
            )
        self.capacity_bytes = capacity_bytes
        self._free: list[PoolExtent] = [PoolExtent(0, capacity_bytes)]
        self._taken: dict[int, PoolExtent] = {}

    @property
    def free_bytes(self) -> int:
        """Sum of the free bytes of all extents."""
        return sum(extent.size_bytes for extent in self._free)

    @property
    def largest_free_bytes(self) -> int:
        """The biggest allocation that would succeed now."""
        return max((extent.size_bytes for extent in self._free), default=0)

    @property
    def free_extents(self) -> tuple[PoolExtent, ...]:
        """Free extents by start; exactly one when nothing is taken."""
        return tuple(self._free)

    def best_fit_bytes(self, n_bytes: int) -> int | None:
        """Size of the free extent that `take(n_bytes)` would cut, None when none is big enough."""
        wanted_bytes = round_up(n_bytes, ALIGNMENT_BYTES)
        return min((e.size_bytes for e in self._free if e.size_bytes >= wanted_bytes), default=None)

    def take(self, n_bytes: int) -> PoolExtent | None:
        """An extent of at least `n_bytes` (rounded up to 4 KiB, never further), or None when no free extent fits."""
        if n_bytes <= 0:
            raise ValueError(f"an extent needs a positive size, got {n_bytes} bytes")
        wanted_bytes = round_up(n_bytes, ALIGNMENT_BYTES)
        best: int | None = None
        for i, extent in enumerate(self._free):
            if extent.size_bytes >= wanted_bytes and (best is None or extent.size_bytes < self._free[best].size_bytes):
                best = i
        if best is None:
            return None
        chosen = self._free[best]
        taken = PoolExtent(chosen.start_bytes, wanted_bytes)
        if chosen.size_bytes == wanted_bytes:
            del self._free[best]
        else:
            self._free[best] = PoolExtent(taken.end_bytes, chosen.size_bytes - wanted_bytes)
        self._taken[taken.start_bytes] = taken
        return taken

    def give_back(self, extent: PoolExtent) -> None:
        """Frees an extent that `take` returned; ValueError when it is not taken (a double release)."""
        if self._taken.get(extent.start_bytes) != extent:
            raise ValueError(f"extent {tuple(extent)} is not taken: released twice, or never handed out by this slab")
        del self._taken[extent.start_bytes]
        start_bytes, end_bytes = extent.start_bytes, extent.end_bytes
        i = bisect_left(self._free, (start_bytes, 0))
        if i < len(self._free) and self._free[i].start_bytes == end_bytes:
            end_bytes = self._free.pop(i).end_bytes
        if i > 0 and self._free[i - 1].end_bytes == start_bytes:
            start_bytes = self._free.pop(i - 1).start_bytes
            i -= 1
        self._free.insert(i, PoolExtent(start_bytes, end_bytes - start_bytes))


class LeaseError(RuntimeError):
    """A lease was used or released after it had been released."""


class Lease:
    """`n_bytes` of staging memory, 4 KiB-aligned, taken from a `PinnedPool` by `owner`.

    Tensors got from it stay valid memory after the release, but another owner may by then be writing there: drop them
    first, and release only when no transfer is under way. Usable as a context manager. Releasing is thread-safe."""

    def __init__(
        self, tensor: torch.Tensor, owner: str, write_combined: bool, is_pinned: bool, on_release: Callable[[], None]
    ) -> None:
        self.owner = owner
        self.n_bytes = tensor.numel()
        self.write_combined = write_combined
        """True when the memory really is write-combined: the CPU must not read it (about 2 GB/s)."""
        self.is_pinned = is_pinned
        self._tensor: torch.Tensor | None = tensor
        self._on_release = on_release
        self._lock = threading.Lock()

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes: 1-D uint8, exactly `n_bytes`. LeaseError after the release."""
        tensor = self._tensor
        if tensor is None:
            raise LeaseError(
                f"{self} was released and is used again: keep a lease until its last transfer and reader are done"
            )
        return tensor

    @property
    def is_released(self) -> bool:
        return self._tensor is None

    def view(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The first bytes as a contiguous tensor of `dtype` and `shape`; ValueError when they do not fit."""
        wanted_bytes = math.prod(shape) * dtype.itemsize
        if wanted_bytes > self.n_bytes:
            raise ValueError(
                f"{tuple(shape)} of {dtype} needs {wanted_bytes} bytes, {self} has {self.n_bytes}: lease more"
            )
        return self.tensor[:wanted_bytes].view(dtype).view(tuple(shape))

    def release(self) -> None:
        """Gives the bytes back to the pool. LeaseError when that has been done before."""
        with self._lock:
            if self._tensor is None:
                raise LeaseError(f"{self} is released for the second time: one owner, one release")
            self._tensor = None
        self._on_release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self.is_released:
            self.release()

    def __repr__(self) -> str:
        return f"the lease of {format_gib(self.n_bytes)} held by {self.owner!r}"
