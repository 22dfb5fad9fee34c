"""Homes: where the bytes of a lane's transfer live when they are not on the device, a file or ordinary RAM.

A lane only asks a home to `fill` a slot from it or to `drain` a slot into it; both return a storage `Transfer`.
`HostCopier` does it for RAM: a few threads with memcpy, which lets Python run meanwhile and writes sequentially, as
write-combined slots want it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Protocol

import torch

from outcore.storage.block_file import BlockFile
from outcore.storage.engine import StorageEngine
from outcore.storage.transfer import Transfer
from outcore.units import MIB

BLOCK_BYTES = 4096
MIN_COPY_BYTES = 2 * MIB
"""Smallest piece worth a thread of its own: a memcpy of 2 MiB takes about 0.2 ms, waking a thread a tenth of that."""


class Home(Protocol):
    """The far end of a transfer; positions count from the transfer's first byte."""

    def phase_bytes(self, start_bytes: int) -> int:
        """Position modulo the block size that a slot should start at, so that direct I/O needs no bounce."""
        ...

    def fill(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        """Home -> slot (1-D uint8)."""
        ...

    def drain(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        """Slot -> home."""
        ...


class FileHome:
    """A range of a `BlockFile`, moved by a storage engine."""

    def __init__(self, engine: StorageEngine, file: BlockFile, offset: int, priority: int) -> None:
        self._engine = engine
        self._file = file
        self._offset = offset
        self._priority = priority

    def phase_bytes(self, start_bytes: int) -> int:
        return (self._offset + start_bytes) % BLOCK_BYTES

    def fill(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        return self._engine.submit_read(self._file, self._offset + start_bytes, slot, priority=self._priority)

    def drain(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        return self._engine.submit_write(self._file, self._offset + start_bytes, slot, priority=self._priority)


class RamHome:
    """Pageable RAM: a 1-D uint8 CPU tensor."""

    def __init__(self, copier: HostCopier, memory: torch.Tensor) -> None:
        self._copier = copier
        self._memory = memory

    def phase_bytes(self, start_bytes: int) -> int:
        return 0

    def fill(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        return self._copier.submit(slot, self._memory[start_bytes : start_bytes + slot.numel()])

    def drain(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        return self._copier.submit(self._memory[start_bytes : start_bytes + slot.numel()], slot)


class HostCopier:
    """Copies between CPU tensors on `num_threads` threads (started at the first copy)."""

    def __init__(self, num_threads: int | None = None, name: str = "lane") -> None:
        self.num_threads = num_threads or min(4, os.cpu_count() or 1)
        self._name = name
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def submit(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        """`target` <- `source`, 1-D uint8 and contiguous, of equal size."""
        n_bytes = source.numel()
        assert target.numel() == n_bytes
        transfer = Transfer(n_bytes, f"copy of {n_bytes} bytes between RAM and staging memory")
        num_pieces = max(1, min(self.num_threads, n_bytes // MIN_COPY_BYTES))
        bounds = [n_bytes * i // num_pieces for i in range(num_pieces + 1)]
        left = num_pieces
        lock = threading.Lock()

        def copy(begin: int, end: int) -> None:
            nonlocal left
            # The closure holds both tensors, so the addresses stay valid.
            ctypes.memmove(target.data_ptr() + begin, source.data_ptr() + begin, end - begin)
            with lock:
                left -= 1
                last = left == 0
            if last:
                transfer.finish()

        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.num_threads, thread_name_prefix=f"{self._name}-copy")
            threads = self._threads
        for begin, end in pairwise(bounds):
            threads.submit(copy, begin, end)
        return transfer

    def close(self) -> None:
        """Finishes what was submitted and ends the threads."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True)
