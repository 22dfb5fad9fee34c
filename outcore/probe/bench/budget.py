"""Budget of the measurements: time, bytes, and the share of each stage.

Three efforts: quick (under 20 s), default (under 90 s), full (about 8 minutes, the whole grid). Each stage gets its
share of what is left when it begins, so that a slow drive or GPU shortens cells instead of stretching the whole."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outcore.common.quantities import GIB, KIB, MIB
from outcore.probe.bench.measurement import Clock

MIN_CELL_S = 0.03


@dataclass(frozen=True)
class ProbeEffort:
    """One level of thoroughness: what it measures."""

    name: str
    total_s: float
    """Seconds of all stages together, without the final report and plot."""
    cell_s: float
    """The most time for one setting of one link."""
    file_bytes: int
    """Size of the test file per directory."""
    blocks_bytes: tuple[int, ...]
    depths: tuple[int, ...]
    full_grid: bool
    """Every block size at every depth; otherwise all depths at one block size, then all sizes at the best depth."""
    write_cell_bytes: int
    """The most bytes one write cell writes: writing is wear."""
    chunks_bytes: tuple[int, ...]
    """Chunk sizes for copies between host and GPU."""
    latency_repeats: int
    staging_cap_bytes: int | None
    """The largest staging buffer this effort builds; None = as configured."""


EFFORTS = {
    "quick": ProbeEffort(
        name="quick",
        total_s=10.0,
        cell_s=0.2,
        file_bytes=256 * MIB,
        blocks_bytes=(256 * KIB, MIB, 8 * MIB),
        depths=(1, 4, 8),
        full_grid=False,
        write_cell_bytes=128 * MIB,
        chunks_bytes=(MIB, 4 * MIB, 16 * MIB, 64 * MIB),
        latency_repeats=4,
        staging_cap_bytes=GIB // 2,
    ),
    "default": ProbeEffort(
        name="default",
        total_s=75.0,
        cell_s=0.5,
        file_bytes=GIB,
        blocks_bytes=(64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB),
        depths=(1, 2, 4, 8, 16, 32),
        full_grid=False,
        write_cell_bytes=256 * MIB,
        chunks_bytes=(64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
        latency_repeats=12,
        staging_cap_bytes=None,
    ),
    "full": ProbeEffort(
        name="full",
        total_s=480.0,
        cell_s=1.0,
        file_bytes=4 * GIB,
        blocks_bytes=(16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB),
        depths=(1, 2, 4, 8, 16, 32, 64),
        full_grid=True,
        write_cell_bytes=512 * MIB,
        chunks_bytes=tuple(64 * KIB << shift for shift in range(15)),
        latency_repeats=40,
        staging_cap_bytes=None,
    ),
}


@dataclass
class Budget:
    """Shares `total_s` among stages by weight; a stage that ends early leaves its rest to those after it."""

    total_s: float
    weights: dict[str, float]
    clock: Clock = time.monotonic
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start_s = self.clock()
        self._left = dict(self.weights)

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.total_s - (self.clock() - self._start_s))

    def begin(self, stage: str, least_s: float = 0.0) -> float:
        """Seconds for this stage, `least_s` even when the time is up; KeyError for a stage without a weight."""
        total_weight = sum(self._left.values())
        return max(least_s, self.remaining_s * self._left.pop(stage) / total_weight)

    def drop(self, stage: str) -> None:
        """Leave out a stage that this machine does not need: its time goes to the others."""
        self._left.pop(stage, None)


def cell_time_s(stage_s: float, cells: int, most_s: float) -> float:
    """Time for each of `cells` settings of a stage."""
    return min(most_s, max(MIN_CELL_S, stage_s / max(1, cells)))
