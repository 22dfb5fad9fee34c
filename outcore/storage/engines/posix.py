"""`PosixEngine`: plain threads around positional reads and writes; works everywhere and needs no package.

Python is no bottleneck for the requests of this project (1 MiB and more): preadv and pwritev release the GIL, and a
piece of 8 MiB takes milliseconds against some fifty microseconds of Python. Measured on a 2-core machine with a virtual
drive: 4, 8 and 16 threads with 8 MiB pieces move what fio moves with libaio (benchmarks/drives/storage_vs_fio.py).
Eight threads are the default because a drive of several GB/s wants some 64 MiB in flight; more threads help no drive
here.

io_uring was measured beside it (the package `pyuring` 0.3.0, and fio's own io_uring engine): the same rates from 1 MiB
on, about half the CPU time, and three times the operations per second at 4 KiB (63,000 against 20,000), which this
project does not issue. Many containers refuse it; the package `liburing` 2026.3 takes only `bytearray` (no pinned
memory) and asks for Linux 6.14; `pyuring` is one person's toolkit. Not adopted.

The GIL shows once: while another thread computes in pure Python, a worker waits up to the switch interval (5 ms) after
each piece. Pieces of 32 MiB keep the rate then (measured 2.0 GB/s against 1.6 with 8 MiB and 2.1 undisturbed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outcore.common.quantities import MIB
from outcore.storage.block_file import BlockFile
from outcore.storage.engines.request_queue import Kind
from outcore.storage.engines.worker import WorkerEngine
from outcore.storage.host_buffer import host_bytes


class PosixMover:
    """Host memory through `BlockFile`'s own blocking calls."""

    def prepare(self, buffer: Any, *, writable: bool) -> tuple[np.ndarray, Callable[[], object] | None]:
        return host_bytes(buffer, writable=writable), None

    def move(self, kind: Kind, file: BlockFile, offset: int, piece: np.ndarray) -> None:
        if kind == "read":
            file.read_into(piece, offset)
        else:
            file.write_from(piece, offset)


class PosixEngine(WorkerEngine):
    """Threads that read and write `BlockFile`s from and into host memory.

    `num_threads`: pieces in flight at most. `block_bytes`: largest piece of one system call. `max_requests`: queued
    requests beyond which `submit_*` waits (back-pressure; memory stays bounded).
    """

    name = "posix"

    def __init__(self, num_threads: int = 8, block_bytes: int = 8 * MIB, max_requests: int = 65536) -> None:
        super().__init__(PosixMover(), num_threads=num_threads, block_bytes=block_bytes, max_requests=max_requests)
