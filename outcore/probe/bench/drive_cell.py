"""One cell of the drive's table: one kind of transfer at one block size and depth, for a fixed time.

A cell keeps two batches in flight so that the queue never drains between them, and walks through the whole file, not
one warm spot. Rates of writes are without fsync, as a training run's are; on filesystems without direct I/O the sync is
inside the time, otherwise RAM would be measured."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from outcore.common.quantities import GB, KIB, MIB
from outcore.probe.bench.measurement import Measurement, timed
from outcore.storage import BlockFile, StorageEngine, Transfer, aligned_bytes, system_file

BATCH_BYTES = 64 * MIB
KINDS = ("drive_read", "drive_write", "drive_mixed")
IOPS_BLOCK_BYTES = 4 * KIB


def batch_limit_bytes(expected_gb_per_s: float, cell_s: float) -> int:
    """Largest batch for a link of that rate: a quarter of a cell, between 4 and 64 MiB."""
    return min(BATCH_BYTES, max(4 * MIB, int(expected_gb_per_s * GB * cell_s / 4) // MIB * MIB))


def bench_memory(n_bytes: int, memory: np.ndarray | None = None) -> np.ndarray:
    """1-D uint8 memory for cells, filled with random bytes once: `memory`, or fresh page-aligned memory.

    Give it staging memory where there is some: O_DIRECT into its huge pages runs up to 2.5 times faster than into
    ordinary 4 KiB pages (each page is pinned and becomes a segment of the request), and training reads into the former.
    """
    buffer = aligned_bytes(n_bytes) if memory is None else memory[:n_bytes]
    pattern = np.frombuffer(os.urandom(min(buffer.nbytes, MIB)), dtype=np.uint8)
    for at in range(0, buffer.nbytes, pattern.nbytes):
        stop = min(at + pattern.nbytes, buffer.nbytes)
        buffer[at:stop] = pattern[: stop - at]
    return buffer


def measure_cell(
    file: BlockFile,
    engine: StorageEngine,
    kind: str,
    block_bytes: int,
    depth: int,
    limit_s: float,
    max_bytes: int | None,
    memory: np.ndarray,
) -> Measurement:
    """One rate of `engine` (whose threads and block the caller has set to `depth` and `block_bytes`).

    `memory` (from `bench_memory`) is cut into four batches of at most 64 MiB; it holds at least four blocks.
    drive_mixed reads the first half of the file while it writes the second; its bytes are the sum of both."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of cell {kind!r}: one of {', '.join(KINDS)}")
    if memory.nbytes < 4 * block_bytes:
        raise ValueError(f"a cell of {block_bytes}-byte blocks needs {4 * block_bytes} bytes, got {memory.nbytes}")
    half = file.size_bytes // 2 // block_bytes * block_bytes
    whole = file.size_bytes // block_bytes * block_bytes
    most_bytes = min(BATCH_BYTES, block_bytes * depth * 2, half, memory.nbytes // 4)
    batch_bytes = max(block_bytes, most_bytes // block_bytes * block_bytes)
    batches = [memory[at : at + batch_bytes] for at in range(0, 4 * batch_bytes, batch_bytes)]
    if kind == "drive_mixed":
        streams = [
            _Stream(file, engine.submit_read, 0, half, batches[:2]),
            _Stream(file, engine.submit_write, half, whole, batches[2:]),
        ]
    else:
        submit = engine.submit_read if kind == "drive_read" else engine.submit_write
        streams = [_Stream(file, submit, 0, whole, batches[:2])]
    turn = 0

    def step() -> int:
        nonlocal turn
        turn += 1
        return streams[turn % len(streams)].advance()

    start_s = time.perf_counter()
    for stream in streams:
        stream.prime()
    moved_bytes, _ = timed(step, limit_s, max_bytes)
    for stream in streams:
        moved_bytes += stream.drain()
    if kind != "drive_read" and not file.direct:
        file.sync()
    elapsed_s = time.perf_counter() - start_s
    return Measurement(kind, str(file.path.parent), engine.name, block_bytes, depth, moved_bytes, elapsed_s)


class _Stream:
    """Keeps two batches of one direction in flight over a part of the file."""

    def __init__(
        self, file: BlockFile, submit: Callable[..., Transfer], start: int, stop: int, batches: list[np.ndarray]
    ) -> None:
        self._file, self._submit, self._batches = file, submit, batches
        self._start, self._stop, self._next = start, stop, start
        self._in_flight: deque[tuple[Transfer, np.ndarray]] = deque()

    def prime(self) -> None:
        for batch in self._batches:
            self._send(batch)

    def advance(self) -> int:
        transfer, batch = self._in_flight.popleft()
        moved_bytes = transfer.wait()
        self._send(batch)
        return moved_bytes

    def drain(self) -> int:
        moved_bytes = sum(transfer.wait() for transfer, _ in self._in_flight)
        self._in_flight.clear()
        return moved_bytes

    def _send(self, batch: np.ndarray) -> None:
        if self._next + batch.nbytes > self._stop:
            self._next = self._start
        self._in_flight.append((self._submit(self._file, self._next, batch), batch))
        self._next += batch.nbytes


def measure_iops(file: BlockFile, depth: int, limit_s: float) -> float:
    """Random 4 KiB reads per second with `depth` threads, as this process can issue them (Python: 100,000 or so).

    Reads through its own file, direct where the given one is."""
    blocks = file.size_bytes // IOPS_BLOCK_BYTES
    own = system_file(file.path, "r", direct=file.direct)
    done = [0] * depth
    failures: list[BaseException] = []
    deadline_s = time.perf_counter() + limit_s

    def work(index: int) -> None:
        chooser = random.Random(index)
        buffer = aligned_bytes(IOPS_BLOCK_BYTES)
        try:
            while time.perf_counter() < deadline_s:
                got = own.read(buffer, chooser.randrange(blocks) * IOPS_BLOCK_BYTES)
                if got != IOPS_BLOCK_BYTES:
                    raise OSError(f"short read of {got} bytes from {file.path}")
                done[index] += 1
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(depth)]
    start_s = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        elapsed_s = time.perf_counter() - start_s
        if not any(thread.is_alive() for thread in threads):
            own.close()
    if failures:
        raise failures[0]
    return sum(done) / elapsed_s
