"""The drive's rates: reads, writes and both at once, by block size, depth and engine; requests per second at 4 KiB.

Cost at the default effort: some 25 cells (`drive_cell`) of at most half a second; write cells are capped in bytes too,
since writing is wear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outcore.common.quantities import MIB
from outcore.probe.bench.budget import ProbeEffort, cell_time_s
from outcore.probe.bench.drive_cell import KINDS, batch_limit_bytes, bench_memory, measure_cell, measure_iops
from outcore.probe.bench.measurement import Measurement, best, smallest_good_enough
from outcore.storage import BlockFile, StorageEngine, open_engine

REFERENCE_BLOCK_BYTES = 8 * MIB
LEAST_GOOD_BLOCK_BYTES = MIB
FINALISTS, FINAL_ROUNDS = 3, 1


@dataclass
class DriveResult:
    """Rates of one directory's drive."""

    target: str
    is_direct: bool
    measurements: list[Measurement] = field(default_factory=list)
    iops_4k: float = 0.0
    iops_depth: int = 0
    written_bytes: int = 0
    line_rate_gb_per_s: float | None = None
    """Most that its PCIe link carries; None where that is not known (virtual disks)."""
    notes: list[str] = field(default_factory=list)


def measure_drive(
    file: BlockFile,
    target: str,
    effort: ProbeEffort,
    stage_s: float,
    engines: Sequence[str] = ("posix",),
    expected_gb_per_s: float = 1.0,
    memory: np.ndarray | None = None,
) -> DriveResult:
    """Measures `file` (open "rw", filled with data).

    The first engine is swept over blocks and depths; the others are compared with it at its best setting and at 8 MiB
    (the whole grid with a full-grid effort). The best settings then run again, so that one lucky cell decides nothing.
    `expected_gb_per_s` (from filling the file) keeps batches small on a slow disk.
    `memory`: staging memory to read into and write from (see `bench_memory`); blocks of which fewer than four fit are
    left out."""
    result = DriveResult(target=target, is_direct=file.direct)
    cell_s = cell_time_s(stage_s, _cell_count(effort, engines), effort.cell_s)
    cells = _Cells(file, effort, cell_s, result, batch_limit_bytes(expected_gb_per_s, cell_s), memory)
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


def _cell_count(effort: ProbeEffort, engines: Sequence[str]) -> int:
    blocks, depths = len(effort.blocks_bytes), len(effort.depths)
    swept = 3 * blocks * depths if effort.full_grid else depths + 3 * blocks
    others = swept if effort.full_grid else 2 * len(KINDS)
    return swept + others * (len(engines) - 1) + FINALISTS * FINAL_ROUNDS + 1


class _Cells:
    """Measures cells into one result."""

    def __init__(
        self,
        file: BlockFile,
        effort: ProbeEffort,
        cell_s: float,
        result: DriveResult,
        batch_bytes: int,
        memory: np.ndarray | None,
    ) -> None:
        self.file, self.effort, self.cell_s, self.result = file, effort, cell_s, result
        self.batch_bytes = batch_bytes
        most_bytes = 4 * max(batch_bytes, max(effort.blocks_bytes))
        self.memory = bench_memory(min(most_bytes, 2 * file.size_bytes), memory)
        self._broken: set[str] = set()

    def sweep(self, engine: str) -> None:
        """Reads at all depths (reference block), then at all blocks (best depth); writes and both at that depth.

        With a full-grid effort every block at every depth."""
        effort = self.effort
        if effort.full_grid:
            for kind in KINDS:
                for depth in effort.depths:
                    for block_bytes in effort.blocks_bytes:
                        self.add(kind, engine, block_bytes, depth)
            return
        fitting = [b for b in effort.blocks_bytes if self._fits(b)]
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

    def _fits(self, block_bytes: int) -> bool:
        """A file or memory too small for this block would say nothing about it."""
        return 2 * block_bytes <= self.file.size_bytes and 4 * block_bytes <= self.memory.nbytes

    def add(self, kind: str, engine_name: str, block_bytes: int, depth: int) -> None:
        """Measures one cell; a second measurement of the same setting is pooled with the first."""
        if engine_name in self._broken or not self._fits(block_bytes):
            return
        try:
            engine = open_bench_engine(engine_name, block_bytes, depth)
        except RuntimeError as error:
            self._broken.add(engine_name)
            self.result.notes.append(f"engine {engine_name} left out: {error}")
            return
        try:
            cap_bytes = None if kind == "drive_read" else self.effort.write_cell_bytes
            memory = self.memory[: 4 * max(self.batch_bytes, block_bytes)]
            found = measure_cell(self.file, engine, kind, block_bytes, depth, self.cell_s, cap_bytes, memory)
            found = replace(found, target=self.result.target)
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


def drive_rate(result: DriveResult, link: str) -> float:
    """The best rate of a link, GB/s; 0 when it was not measured."""
    fastest = best(result.measurements, link=link)
    return fastest.gb_per_s if fastest else 0.0
