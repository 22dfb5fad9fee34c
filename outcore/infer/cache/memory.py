"""Homes of pages of keys and values live: on the device that computes, in RAM that it reads over the link, or plain
RAM.

Page-locked RAM has an address on the GPU. A tensor made over that address is one of the GPU's to torch: the kernel that
gathers pages reads them over PCIe, and none is copied twice. Where memory cannot be page-locked, pages are gathered by
the CPU and sent, several times slower; `note` says so."""

from __future__ import annotations

import math
from typing import Any

import torch

from outcore.common.quantities import MIB, format_gib
from outcore.infer.cache.store import KvFormat, KvShape, KvStore
from outcore.staging.pool import ALIGNMENT_BYTES, PinnedPool, device_view

SPARE_BYTES = 4 * MIB
"""Beside the pages themselves: each lease is rounded up to a page of memory."""


class KvMemory:
    """Memory of one kind. `device`: where its tensors live to torch, and their index tensors must be; `crosses_link`:
    whether every read of a page crosses the link to the GPU."""

    crosses_link = False

    def __init__(self, device: torch.device) -> None:
        self.device, self.note = device, ""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor there, all zero."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def store(
        self, shape: KvShape, num_pages: int, page_tokens: int, dtype: torch.dtype, kv_format: KvFormat
    ) -> KvStore:
        """Pages of one attention there."""
        return KvStore(shape, num_pages, page_tokens, dtype, self, kv_format)

    def close(self) -> None:
        """Let it go; no tensor of it may be used any more."""


class MappedMemory(KvMemory):
    """Page-locked RAM that a GPU reads and writes over the link."""

    crosses_link = True

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        super().__init__(device)
        self._pool = PinnedPool(n_bytes + SPARE_BYTES, device=device)
        self._leases: list[Any] = []
        if not self._pool.is_pinned or self._pool.capacity_bytes < n_bytes:
            self._pool.close()
            raise MemoryError(f"the machine does not page-lock {format_gib(n_bytes)}")
        lease = self._pool.lease(ALIGNMENT_BYTES, "trial of an address")
        try:
            device_view(lease.tensor, device)
        except BaseException:
            lease.release()
            self._pool.close()
            raise
        lease.release()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        lease = self._pool.lease(math.prod(shape) * dtype.itemsize, "keys and values")
        self._leases.append(lease)
        return device_view(lease.tensor.zero_(), self.device).view(dtype).view(shape)

    def close(self) -> None:
        for lease in self._leases:
            lease.release()
        self._leases.clear()
        self._pool.close()
