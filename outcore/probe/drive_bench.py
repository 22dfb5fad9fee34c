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
from dataclasses import dataclass, field, replace

import numpy as np

from outcore.probe.budget import Effort, cell_time_s
from outcore.probe.measurement import Measurement, best, smallest_good_enough, timed
from outcore.storage import BlockFile, StorageEngine, Transfer, aligned_bytes, open_engine
from outcore.units import KIB, MIB

REFERENCE_BLOCK_BYTES = 8 * MIB
BATCH_BYTES = 64 * MIB
KINDS = ("drive_read", "drive_write", "drive_mixed")
IOPS_BLOCK_BYTES = 4 * KIB
LEAST_GOOD_BLOCK_BYTES = MIB
FINALISTS, FINAL_ROUNDS = 3, 1


@dataclass
class DriveResult:
    """What one directory's drive does."""

    target: str
    is_direct: bool
    measurements: list[Measurement] = field(default_factory=list)
    iops_4k: float = 0.0
    iops_depth: int = 0
    written_bytes: int = 0
    line_rate_gb_per_s: float | None = None
    """What its PCIe link carries at most; None where that is not known (virtual disks)."""
    notes: list[str] = field(default_factory=list)


def measure_drive(
    file: BlockFile,
    target: str,
    effort: Effort,
    stage_s: float,
    engines: Sequence[str] = ("posix",),
    tick: Callable[[str], None] = lambda label: None,
) -> DriveResult:
    """Measures `file` (open "rw", filled with data). `tick` is told what is being measured.

    The first engine is swept over blocks and depths; the others are compared with it at its best setting and at 8 MiB
    (the whole grid with a full-grid effort). The best settings then run again, so that one lucky cell decides nothing.
    """
    result = DriveResult(target=target, is_direct=file.direct)
    cells = _Cells(file, effort, cell_time_s(stage_s, _cell_count(effort, engines), effort.cell_s), result, tick)
    for index, engine in enumerate(engines):
        if index and not effort.full_grid:
            chosen = recommended(result)
            settings = {(chosen.block_bytes, chosen.depth)} if chosen else set()
            for block_bytes, depth in sorted(settings | {(REFERENCE_BLOCK_BYTES, max(effort.depths))}):
                for kind in KINDS:
                    cells.add(kind, engine, block_bytes, depth)
        else:
            cells.sweep(engine)
    for finalist in finalists(result):
        for _ in range(FINAL_ROUNDS):
            cells.add(finalist.link, finalist.engine, finalist.block_bytes, finalist.depth)
    tick("requests per second at 4 KiB")
    result.iops_depth = max(effort.depths)
    result.iops_4k = measure_iops(file, result.iops_depth, cells.cell_s)
    return result


def finalists(result: DriveResult) -> list[Measurement]:
    """The fastest settings on reads and writes at once, which is what training does."""
    mixed = [m for m in result.measurements if m.link == "drive_mixed"]
    return sorted(mixed, key=lambda m: -m.gb_per_s)[:FINALISTS]


def recommended(result: DriveResult) -> Measurement | None:
    """The setting to use: of those within 3 % of the fastest the one with the fewest bytes in flight; None without any.

    Judged on reads and writes at once where that was measured, else on reads; blocks under 1 MiB only where nothing
    else was measured, because each request costs some 20-50 us of Python, a core's worth at 6 GB/s in 256 KiB blocks.
    """
    for link in ("drive_mixed", "drive_read"):
        known = [m for m in result.measurements if m.link == link]
        large = [m for m in known if m.block_bytes >= LEAST_GOOD_BLOCK_BYTES] or known
        if large:
            return smallest_good_enough(large)
    return None


def _cell_count(effort: Effort, engines: Sequence[str]) -> int:
    blocks, depths = len(effort.blocks_bytes), len(effort.depths)
    swept = 3 * blocks * depths if effort.full_grid else depths + 3 * blocks
    others = swept if effort.full_grid else 2 * len(KINDS)
    return swept + others * (len(engines) - 1) + FINALISTS * FINAL_ROUNDS + 1


class _Cells:
    """Measures cells into one result."""

    def __init__(
        self, file: BlockFile, effort: Effort, cell_s: float, result: DriveResult, tick: Callable[[str], None]
    ) -> None:
        self.file, self.effort, self.cell_s, self.result, self.tick = file, effort, cell_s, result, tick
        self._broken: set[str] = set()

    def sweep(self, engine: str) -> None:
        """Reads at all depths (reference block), then at all blocks (best depth); writes and both at that depth.

        With a full-grid effort every block at every depth.
        """
        effort = self.effort
        if effort.full_grid:
            for kind in KINDS:
                for depth in effort.depths:
                    for block_bytes in effort.blocks_bytes:
                        self.add(kind, engine, block_bytes, depth)
            return
        fitting = [b for b in effort.blocks_bytes if 2 * b <= self.file.size_bytes]
        reference = max((b for b in fitting if b <= REFERENCE_BLOCK_BYTES), default=min(effort.blocks_bytes))
        for depth in effort.depths:
            self.add("drive_read", engine, reference, depth)
        fastest = smallest_good_enough(m for m in self.result.measurements if m.engine == engine)
        if fastest is None:
            return
        for kind in KINDS:
            for block_bytes in effort.blocks_bytes:
                if kind != "drive_read" or block_bytes != reference:
                    self.add(kind, engine, block_bytes, fastest.depth)

    def add(self, kind: str, engine_name: str, block_bytes: int, depth: int) -> None:
        """Measures one cell; a second measurement of the same setting is pooled with the first."""
        if block_bytes * 2 > self.file.size_bytes or engine_name in self._broken:
            return  # a file too small for this block says nothing about it
        self.tick(f"{kind.replace('_', ' ')}, {engine_name}, {block_bytes // KIB} KiB x {depth}")
        try:
            engine = open_bench_engine(engine_name, block_bytes, depth)
        except RuntimeError as error:
            self._broken.add(engine_name)
            self.result.notes.append(f"engine {engine_name} left out: {error}")
            return
        try:
            cap_bytes = None if kind == "drive_read" else self.effort.write_cell_bytes
            target = self.result.target
            found = measure_cell(self.file, engine, kind, block_bytes, depth, self.cell_s, cap_bytes, target)
        finally:
            engine.close()
        if kind != "drive_read":
            self.result.written_bytes += found.moved_bytes // (2 if kind == "drive_mixed" else 1)
        known = self.result.measurements
        for index, old in enumerate(known):
            if (old.link, old.engine, old.block_bytes, old.depth) == (kind, found.engine, block_bytes, depth):
                moved_bytes, elapsed_s = old.moved_bytes + found.moved_bytes, old.elapsed_s + found.elapsed_s
                known[index] = replace(old, moved_bytes=moved_bytes, elapsed_s=elapsed_s)
                return
        known.append(found)


def open_bench_engine(name: str, block_bytes: int, depth: int) -> StorageEngine:
    """An engine with `depth` requests of `block_bytes` in flight. RuntimeError where it does not run here."""
    if name == "kvikio":
        return open_engine(name, num_threads=depth, task_bytes=block_bytes)
    return open_engine(name, num_threads=depth, block_bytes=block_bytes)


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
