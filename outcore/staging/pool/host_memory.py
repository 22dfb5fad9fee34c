"""RAM for homes: leased from the pinned pool while it lasts (less a reserve), pageable beyond it.

Pageable memory is mapped privately with huge pages asked for, and touched at once (or by its first writer). Pinned
homes are copied directly, pageable ones through the lanes' pinned slots, so results never depend on which it was.

Where the pool does not hold all homes of a kind, `which_pinned` spreads it evenly over the layers: copying a pageable
home takes the CPU several times as long as the link takes for a pinned one, which hides behind the compute of its
neighbours; were they all in a row, the pass would go at the copies' rate there and the CPU would idle elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from outcore.common.quantities import round_up
from outcore.staging.pool.allocator import ALIGNMENT_BYTES
from outcore.staging.pool.lease import Lease
from outcore.staging.pool.pool import PinnedPool, PinnedPoolFull
from outcore.staging.pool.slab import MappedSlab

logger = logging.getLogger(__name__)


class HomeMemory(Protocol):
    """Who has RAM for homes: private to this process (`HostMemory`) or shared with others."""

    def take(self, n_bytes: int, owner: str, *, pinned: bool = True, touch: bool = True) -> torch.Tensor: ...
    def which_pinned(self, sizes: Sequence[tuple[int, int]]) -> frozenset[int]: ...


class HostMemory:
    """Hands out byte tensors. `pool` None: everything pageable; `reserve_bytes` of it are left free."""

    def __init__(self, pool: PinnedPool | None = None, reserve_bytes: int = 0) -> None:
        self._pool = pool if pool is not None and pool.is_pinned else None
        self._reserve_bytes = reserve_bytes
        self._leases: dict[int, Lease] = {}
        """Leases by address."""
        self.pinned_bytes = 0
        self.pageable_bytes = 0

    def take(self, n_bytes: int, owner: str, *, pinned: bool = True, touch: bool = True) -> torch.Tensor:
        """1-D uint8 of `n_bytes`, all zero. `pinned` False: memory that never crosses to the device; `touch` False:
        the caller writes all of it at once, and so makes its pages real without a pass more."""
        if pinned and n_bytes and self._pool is not None and self._pool.free_bytes >= n_bytes + self._reserve_bytes:
            try:
                lease = self._pool.lease(n_bytes, owner)
            except PinnedPoolFull:
                logger.debug("%s: the pinned pool is too fragmented for it", owner)
            else:
                self._leases[lease.tensor.data_ptr()] = lease
                self.pinned_bytes += lease.tensor.nbytes
                return lease.tensor.zero_()
        self.pageable_bytes += n_bytes
        return pageable(n_bytes, touch=touch)

    def give_back(self, home: torch.Tensor) -> None:
        """What `take` returned, and nobody uses any more."""
        lease = self._leases.pop(home.data_ptr(), None)
        if lease is None:
            self.pageable_bytes -= home.nbytes  # freed with the last reference to it
        else:
            self.pinned_bytes -= home.nbytes
            lease.release()

    def which_pinned(self, sizes: Sequence[tuple[int, int]]) -> frozenset[int]:
        """Choose of homes (unit's index, bytes) in order of need those that the pool has room for: the first and the
        last, embedding and head, which have no neighbour to hide behind, then an even spread of the layers."""
        if self._pool is None:
            return frozenset()
        return spread_pinned(sizes, self._pool.free_bytes - self._reserve_bytes)

    def close(self) -> None:
        """Give the leases back; nothing taken may be used any more."""
        for lease in self._leases.values():
            if not lease.is_released:
                lease.release()
        self._leases.clear()


def spread_pinned(sizes: Sequence[tuple[int, int]], left_bytes: int) -> frozenset[int]:
    """`HostMemory.which_pinned` for `left_bytes` of pinned memory."""
    left = max(0, left_bytes)
    rooms = [(index, round_up(n_bytes, ALIGNMENT_BYTES)) for index, n_bytes in sizes]
    chosen: set[int] = set()
    for index, room in (*rooms[:1], *rooms[1:][-1:]):
        if room <= left:
            chosen.add(index)
            left -= room
    layers = rooms[1:-1]
    share = min(1.0, left / max(1, sum(room for _, room in layers)))
    passed = taken = 0
    for index, room in layers:
        passed += room
        if taken + room <= left and taken < share * passed:
            chosen.add(index)
            taken += room
    return frozenset(chosen)


def pageable(n_bytes: int, *, touch: bool = True) -> torch.Tensor:
    """1-D uint8 of `n_bytes` zeros at the start of a page; with `touch` its pages are real from here on."""
    if n_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    return MappedSlab(round_up(n_bytes, ALIGNMENT_BYTES), None, touch=touch).tensor[:n_bytes]
