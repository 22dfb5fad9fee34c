"""Homes: where the bytes of a lane's transfer live when they are not on the device: a file, a store, ordinary RAM.

A lane only asks a home to `fill` a slot from it or to `drain` a slot into it; both return a storage `Transfer`.
`HostCopier` does it for RAM: a few threads with memcpy, which lets Python run meanwhile and writes sequentially, as
write-combined slots want it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Protocol

import torch

from outcore.common.quantities import MIB
from outcore.machine import usable_cores
from outcore.sizing.streaming import copy_threads
from outcore.storage import BlockFile, StorageEngine, Transfer
from outcore.storage.store import TensorStore

BLOCK_BYTES = 4096
MIN_COPY_BYTES = 2 * MIB
"""Smallest piece worth a thread of its own: a memcpy of 2 MiB takes about 0.2 ms, waking a thread a tenth of that."""


class Home(Protocol):
    """The far end of a transfer; positions count from the transfer's first byte."""

    @property
    def grain_bytes(self) -> int:
        """Chunks end at multiples of this position in the home, except the last one."""
        ...

    def position_bytes(self, start_bytes: int) -> int:
        """Place where that byte lies in the home; slots start at the same position modulo 4 KiB, so that direct I/O
        needs no bounce."""
        ...

    def fill(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        """Home -> slot (1-D uint8)."""
        ...

    def drain(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        """Slot -> home."""
        ...


class FileHome:
    """A range of a `BlockFile`, moved by a storage engine."""

    grain_bytes = BLOCK_BYTES

    def __init__(self, engine: StorageEngine, file: BlockFile, offset: int) -> None:
        self._engine = engine
        self._file = file
        self._offset = offset

    def position_bytes(self, start_bytes: int) -> int:
        return self._offset + start_bytes

    def fill(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        return self._engine.submit_read(self._file, self._offset + start_bytes, slot)

    def drain(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        return self._engine.submit_write(self._file, self._offset + start_bytes, slot)


class StoreHome:
    """A byte range of a tensor in a `TensorStore`, which stripes it over its drives and verifies what it reads."""

    def __init__(
        self,
        store: TensorStore,
        name: str,
        offset_bytes: int,
        tensor: torch.Tensor,
        slot_bytes: int,
    ) -> None:
        spec = store.spec(name)
        if tensor.dtype not in (spec.dtype, torch.uint8):
            raise ValueError(f"{name!r} holds {spec.dtype}, the tensor given has {tensor.dtype}")
        if not 0 <= offset_bytes <= spec.n_bytes - tensor.nbytes:
            raise ValueError(
                f"{tensor.nbytes} bytes at offset_bytes={offset_bytes} do not fit into {name!r} of {spec.n_bytes} bytes"
            )
        self._store = store
        self._name = name
        self._offset_bytes = offset_bytes
        # Pieces end with whole blocks of the digests, so that each is verified alone.
        self.grain_bytes = max(BLOCK_BYTES, store.grain_bytes)
        if slot_bytes < 2 * self.grain_bytes:
            self.grain_bytes = BLOCK_BYTES  # parts of a block are verified as they were written

    def position_bytes(self, start_bytes: int) -> int:
        return self._offset_bytes + start_bytes  # extents start on blocks

    def fill(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        return self._store.submit_read(self._name, slot, self.position_bytes(start_bytes))

    def drain(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        return self._store.submit_write(self._name, slot, self.position_bytes(start_bytes))


class RamHome:
    """Pageable RAM: a 1-D uint8 CPU tensor."""

    grain_bytes = BLOCK_BYTES

    def __init__(self, copier: HostCopier, memory: torch.Tensor) -> None:
        self._copier = copier
        self._memory = memory

    def position_bytes(self, start_bytes: int) -> int:
        return start_bytes

    def fill(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        return self._copier.submit(slot, self._memory[start_bytes : start_bytes + slot.numel()])

    def drain(self, start_bytes: int, slot: torch.Tensor) -> Transfer:
        return self._copier.submit(self._memory[start_bytes : start_bytes + slot.numel()], slot)


class HostCopier:
    """Copies between CPU tensors on `num_threads` threads (started at the first copy). `at_once`: copies that are under
    way together; threads share one only where there are fewer. A piece costs the interpreter's lock, which launches
    need: in pieces of 2 MiB 16 threads reached 18.8 GB/s on a host whose memory gave them 53, eight 26.6."""

    def __init__(self, num_threads: int | None = None, name: str = "lane", at_once: int = 1) -> None:
        self.num_threads = num_threads or copy_threads(usable_cores())
        self._most_pieces = -(-self.num_threads // at_once)
        self._name = name
        self._pieces: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        """`target` <- `source`, 1-D uint8 and contiguous, of equal size."""
        n_bytes = source.numel()
        assert target.numel() == n_bytes
        transfer = Transfer(n_bytes, f"copy of {n_bytes} bytes between RAM and staging memory")
        num_pieces = max(1, min(self._most_pieces, n_bytes // MIN_COPY_BYTES))
        bounds = [n_bytes * i // num_pieces for i in range(num_pieces + 1)]
        left, failed = num_pieces, None
        lock = threading.Lock()

        def copy(begin: int, end: int) -> None:
            nonlocal left, failed
            error: BaseException | None = None
            try:  # the closure holds both tensors, so the addresses stay valid
                ctypes.memmove(target.data_ptr() + begin, source.data_ptr() + begin, end - begin)
            except BaseException as raised:  # raised again on the thread that waits
                error = raised
            with lock:
                left, failed = left - 1, failed or error
                last = left == 0
            if last:
                transfer.finish(failed)

        with self._lock:
            while len(self._threads) < self.num_threads:
                name = f"{self._name}-copy-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()  # which the system may refuse: only those that run count
                self._threads.append(thread)
        for begin, end in pairwise(bounds):
            self._pieces.put(partial(copy, begin, end))
        return transfer

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            piece()
            del piece  # an idle thread keeps no tensor alive

    def close(self) -> None:
        """Finishes what was submitted and ends the threads."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._pieces.put(None)
        for thread in threads:
            thread.join()
