"""The drive's rates: reads, writes and both at once, by block size, depth and engine; requests per second at 4 KiB.

A cell keeps two batches in flight so that the queue never drains between them, walks through the whole file (not one
warm spot), and takes a fixed time. Cost at the default effort: about 25 cells per engine of at most half a second;
write cells are also capped in bytes, since writing is wear. Rates of writes are without fsync, as a training run's
are; on filesystems without direct I/O the sync is inside the time, otherwise RAM would be measured.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outcore.probe.budget import Effort, cell_time_s
from outcore.probe.measurement import Measurement, best, smallest_good_enough, timed
from outcore.storage import BlockFile, StorageEngine, Transfer, aligned_bytes, open_engine
from outcore.units import KIB, MIB

REFERENCE_BLOCK_BYTES = 8 * MIB
BATCH_BYTES = 64 * MIB
KINDS = ("drive_read", "drive_write", "drive_mixed")
IOPS_BLOCK_BYTES = 4 * KIB


@dataclass
class DriveResult:
    """What one directory's drive does."""

    target: str
    is_direct: bool
    measurements: list[Measurement] = field(default_factory=list)
    iops_4k: float = 0.0
    iops_depth: int = 0
    written_bytes: int = 0
    notes: list[str] = field(default_factory=list)


def measure_drive(
    file: BlockFile,
    target: str,
    effort: Effort,
    stage_s: float,
    engines: Sequence[str] = ("posix",),
    tick: Callable[[str], None] = lambda label: None,
) -> DriveResult:
    """Measures `file` (open "rw", filled with data) through each engine. `tick` is told what is being measured."""
    result = DriveResult(target=target, is_direct=file.direct)
    cell_s = cell_time_s(stage_s, _cells(effort) * len(engines) + 2, effort.cell_s)
    for engine in engines:
        reads = _sweep(file, "drive_read", engine, effort, cell_s, result, tick)
        chosen = smallest_good_enough(reads)
        if chosen is None:
            continue
        depths = effort.depths if effort.full_grid else (chosen.depth,)
        for kind in ("drive_write", "drive_mixed"):
            for depth in depths:
                for block_bytes in effort.blocks_bytes:
                    tick(f"{kind} {engine} {block_bytes // KIB} KiB x {depth}")
                    _add_cell(file, kind, engine, block_bytes, depth, cell_s, effort, result)
    tick("requests per second at 4 KiB")
    result.iops_depth = max(effort.depths)
    result.iops_4k = measure_iops(file, result.iops_depth, cell_s)
    return result


def _cells(effort: Effort) -> int:
    blocks, depths = len(effort.blocks_bytes), len(effort.depths)
    return 3 * blocks * depths if effort.full_grid else depths + 3 * blocks


def _sweep(
    file: BlockFile,
    kind: str,
    engine: str,
    effort: Effort,
    cell_s: float,
    result: DriveResult,
    tick: Callable[[str], None],
) -> list[Measurement]:
    """All depths at the reference block, then all blocks at the best depth (or the whole grid)."""
    if effort.full_grid:
        plan = [(block, depth) for depth in effort.depths for block in effort.blocks_bytes]
    else:
        reference = min(REFERENCE_BLOCK_BYTES, max(effort.blocks_bytes))
        plan = [(reference, depth) for depth in effort.depths]
    for block_bytes, depth in plan:
        tick(f"{kind} {engine} {block_bytes // KIB} KiB x {depth}")
        if not _add_cell(file, kind, engine, block_bytes, depth, cell_s, effort, result):
            return []
    found = [m for m in result.measurements if m.engine == engine and m.link == kind]
    if not effort.full_grid:
        fastest = smallest_good_enough(found)
        done = {m.block_bytes for m in found}
        for block_bytes in (b for b in effort.blocks_bytes if fastest is not None and b not in done):
            assert fastest is not None
            tick(f"{kind} {engine} {block_bytes // KIB} KiB x {fastest.depth}")
            _add_cell(file, kind, engine, block_bytes, fastest.depth, cell_s, effort, result)
    return [m for m in result.measurements if m.engine == engine and m.link == kind]


def _add_cell(
    file: BlockFile,
    kind: str,
    engine_name: str,
    block_bytes: int,
    depth: int,
    cell_s: float,
    effort: Effort,
    result: DriveResult,
) -> bool:
    """Measures one cell into `result`; False (with a note) when the engine does not run here."""
    if block_bytes * 2 > file.size_bytes:
        return True  # the file is too small for this block: nothing to say about it
    try:
        engine = open_engine(engine_name, num_threads=depth, block_bytes=block_bytes)
    except (RuntimeError, ImportError) as error:
        result.notes.append(f"engine {engine_name} left out: {error}")
        return False
    try:
        cap_bytes = None if kind == "drive_read" else effort.write_cell_bytes
        measurement = measure_cell(file, engine, kind, block_bytes, depth, cell_s, cap_bytes, result.target)
    finally:
        engine.close()
    result.measurements.append(measurement)
    if kind != "drive_read":
        result.written_bytes += measurement.moved_bytes // (2 if kind == "drive_mixed" else 1)
    return True


def measure_cell(
    file: BlockFile,
    engine: StorageEngine,
    kind: str,
    block_bytes: int,
    depth: int,
    limit_s: float,
    max_bytes: int | None,
    target: str,
) -> Measurement:
    """One rate of `engine` (whose threads and block the caller has set to `depth` and `block_bytes`).

    drive_mixed reads the first half of the file while it writes the second; its bytes are the sum of both.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of cell {kind!r}: one of {', '.join(KINDS)}")
    half = file.size_bytes // 2 // block_bytes * block_bytes
    whole = file.size_bytes // block_bytes * block_bytes
    batch_bytes = max(block_bytes, min(BATCH_BYTES, block_bytes * depth * 2, half) // block_bytes * block_bytes)
    if kind == "drive_mixed":
        streams = [
            _Stream(file, engine.submit_read, 0, half, batch_bytes),
            _Stream(file, engine.submit_write, half, whole, batch_bytes),
        ]
    else:
        submit = engine.submit_read if kind == "drive_read" else engine.submit_write
        streams = [_Stream(file, submit, 0, whole, batch_bytes)]
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
    return Measurement(kind, target, engine.name, block_bytes, depth, moved_bytes, elapsed_s)


class _Stream:
    """Keeps two batches of one direction in flight over a part of the file."""

    def __init__(self, file: BlockFile, submit: Callable[..., Transfer], start: int, stop: int, batch_bytes: int):
        self._file, self._submit = file, submit
        self._start, self._stop, self._next = start, stop, start
        self._in_flight: deque[tuple[Transfer, np.ndarray]] = deque()
        self._buffers = [_random_buffer(batch_bytes) for _ in range(2)]

    def prime(self) -> None:
        for buffer in self._buffers:
            self._send(buffer)

    def advance(self) -> int:
        transfer, buffer = self._in_flight.popleft()
        moved_bytes = transfer.wait()
        self._send(buffer)
        return moved_bytes

    def drain(self) -> int:
        moved_bytes = sum(transfer.wait() for transfer, _ in self._in_flight)
        self._in_flight.clear()
        return moved_bytes

    def _send(self, buffer: np.ndarray) -> None:
        if self._next + buffer.nbytes > self._stop:
            self._next = self._start
        self._in_flight.append((self._submit(self._file, self._next, buffer), buffer))
        self._next += buffer.nbytes


def _random_buffer(n_bytes: int) -> np.ndarray:
    """Aligned memory of random bytes: a repeated 1 MiB pattern, which is enough for drives and quick to make."""
    buffer = aligned_bytes(n_bytes)
    pattern = np.frombuffer(os.urandom(min(n_bytes, MIB)), dtype=np.uint8)
    for at in range(0, n_bytes, pattern.nbytes):
        stop = min(at + pattern.nbytes, n_bytes)
        buffer[at:stop] = pattern[: stop - at]
    return buffer


def measure_iops(file: BlockFile, depth: int, limit_s: float) -> float:
    """Random 4 KiB reads per second with `depth` threads, as this process can issue them (Python: 100,000 or so).

    Reads through its own descriptor with O_DIRECT where the file has it.
    """
    flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if file.direct else 0)
    blocks = file.size_bytes // IOPS_BLOCK_BYTES
    fd = os.open(file.path, flags)
    done = [0] * depth
    failures: list[BaseException] = []
    deadline_s = time.perf_counter() + limit_s

    def work(index: int) -> None:
        chooser = random.Random(index)
        buffer = aligned_bytes(IOPS_BLOCK_BYTES).data
        try:
            while time.perf_counter() < deadline_s:
                got = os.preadv(fd, [buffer], chooser.randrange(blocks) * IOPS_BLOCK_BYTES)
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
            os.close(fd)
    if failures:
        raise failures[0]
    return sum(done) / elapsed_s


def drive_rate(result: DriveResult, link: str) -> float:
    """The best rate of a link, GB/s; 0 when it was not measured."""
    fastest = best(result.measurements, link=link)
    return fastest.gb_per_s if fastest else 0.0
