"""The staging test: builds the pool as configured, runs drive <-> pinned slots <-> device through the lanes, and says
how much of the slowest link the pipeline reaches.

overlap = pipeline rate / slowest link, where the links are measured right before and after with the same engine, block,
depth and kind of memory: 1.0 means that nothing but the slowest link takes time. Cost: building the pool (0.3-0.5 s per
GiB) and eight to ten cells."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from outcore.common.quantities import MIB, round_up
from outcore.probe.bench.budget import ProbeEffort, cell_time_s
from outcore.probe.bench.device import measure_copies
from outcore.probe.bench.drive_cell import bench_memory, measure_cell
from outcore.probe.bench.measurement import Measurement, timed
from outcore.sizing.streaming import NOT_SLOWER_SHARE, PAGEABLE_SLOTS, SLOT_BYTES
from outcore.staging import AT_ONCE, DownloadLane, LaneSettings, PinnedPool, UploadLane
from outcore.storage import BlockFile, PosixEngine, StorageEngine

TRANSFER_BYTES = 64 * MIB
ROUNDS = 3
SLOT_CANDIDATES_BYTES = (8 * MIB, 32 * MIB, 64 * MIB)


@dataclass(frozen=True)
class ProbeStaging:
    """Settings of the pool and its lanes, from the configuration."""

    staging_bytes: int
    write_combined: str
    """'auto' (measured), 'on' or 'off'."""


@dataclass
class StagingTest:
    """Result: the pool that was made, and the rates through it in GB/s."""

    asked_bytes: int
    granted_bytes: int = 0
    write_combined_bytes: int = 0
    is_pinned: bool = False
    build_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    write_combined: bool = False
    """Whether the upload lanes are to use write-combined slots."""
    write_combined_reason: str = ""
    slot_bytes: int = 0
    num_slots: int = 0
    up_gb_per_s: float = 0.0
    up_limit: str = ""
    up_overlap: float = 0.0
    down_gb_per_s: float = 0.0
    down_limit: str = ""
    down_overlap: float = 0.0
    measurements: list[Measurement] = field(default_factory=list)


def build_pool(settings: ProbeStaging, device: torch.device, test: StagingTest) -> PinnedPool:
    """The pool as configured: half of it write-combined when that is on or to be measured, and there is a GPU."""
    wants_combined = settings.write_combined != "off" and device.type == "cuda"
    start_s = time.perf_counter()
    pool = PinnedPool(
        settings.staging_bytes,
        device=device,
        write_combined_bytes=round_up(settings.staging_bytes // 2, 4096) if wants_combined else 0,
    )
    test.build_s = time.perf_counter() - start_s
    test.granted_bytes = pool.capacity_bytes
    test.write_combined_bytes = pool.write_combined_bytes
    test.is_pinned = pool.is_pinned
    test.notes += pool.notes
    return pool


def choose_write_combined(settings: ProbeStaging, copies: list[Measurement], device: torch.device) -> tuple[bool, str]:
    """Whether upload slots are write-combined, and the figures that say so. 'auto' is on unless measured slower."""
    if device.type != "cuda":
        return False, "no GPU: write-combined memory is a kind of pinned memory"
    if settings.write_combined in ("on", "off"):
        return settings.write_combined == "on", f"the configuration says {settings.write_combined}"
    default, combined = upload_rates(copies)
    if combined == 0.0:
        return False, "the machine gave no write-combined memory"
    figures = f"write-combined {combined:.1f} GB/s, default {default:.1f} GB/s to the GPU"
    if combined < NOT_SLOWER_SHARE * default:
        return False, f"measured slower: {figures}"
    return True, f"measured not slower: {figures}; it also spares the CPU's caches"


def upload_rates(copies: list[Measurement]) -> tuple[float, float]:
    """GB/s to the GPU from (default, write-combined) pinned memory, the best of all sizes; 0 where not measured."""
    rates = [
        max((m.gb_per_s for m in copies if m.link == "h2d" and m.engine == kind), default=0.0)
        for kind in ("default", "write-combined")
    ]
    return rates[0], rates[1]


def slot_plan(pool_bytes: int, block_bytes: int, depth: int, quick: bool) -> list[tuple[int, int]]:
    """(slot size, slots) worth trying: enough slots that `depth` blocks are in flight while another slot is copied."""
    plans = []
    for slot_bytes in SLOT_CANDIDATES_BYTES[:1] if quick else SLOT_CANDIDATES_BYTES:
        slots = max(2, -(-block_bytes * depth // slot_bytes) + 2)
        while slots > 2 and slots * slot_bytes > pool_bytes:
            slots -= 1
        if slots * slot_bytes <= pool_bytes:
            plans.append((slot_bytes, slots))
    return plans or [(max(4096, pool_bytes // 2 // 4096 * 4096), 2)]


def run_staging_test(
    pool: PinnedPool,
    engine: PosixEngine,
    file: BlockFile,
    test: StagingTest,
    effort: ProbeEffort,
    *,
    stage_s: float,
    transfer_bytes: int = TRANSFER_BYTES,
) -> StagingTest:
    """Fills the rates of `test` in `stage_s`. `engine` is the caller's and stays open."""
    block_bytes, depth, max_write_bytes = engine.block_bytes, engine.num_threads, effort.write_cell_bytes
    device, quick = pool.device, effort.name == "quick"
    room_bytes = pool.largest_free_bytes(False)
    if test.write_combined:
        room_bytes = min(room_bytes, pool.largest_free_bytes(True))
    plans = slot_plan(room_bytes, block_bytes, depth, quick)
    cell_s = cell_time_s(stage_s, len(plans) + 2 * (2 * (1 if quick else ROUNDS) + 3), effort.cell_s)

    def lane_rate(direction: str, slot_bytes: int, slots: int) -> Measurement:
        lane = LaneSettings(slot_bytes, slots, test.write_combined and direction == "up")
        max_bytes = None if direction == "up" else max_write_bytes
        found = measure_lane(pool, engine, file, direction, lane, cell_s, max_bytes, transfer_bytes)
        test.measurements.append(found)
        return found

    def drive_limit(drive_link: str, cap_bytes: int | None) -> float:
        n_bytes = max(4 * block_bytes, min(2 * TRANSFER_BYTES, pool.largest_free_bytes()))
        with contextlib.ExitStack() as stack:
            memory = None
            if n_bytes <= pool.largest_free_bytes():
                memory = stack.enter_context(pool.lease(n_bytes, "drive measurement")).tensor.numpy()
            memory = bench_memory(n_bytes, memory)[: 4 * max(transfer_bytes, block_bytes)]
            found = measure_cell(file, engine, drive_link, block_bytes, depth, cell_s, cap_bytes, memory)
        return found.gb_per_s

    ups = [lane_rate("up", slot_bytes, slots) for slot_bytes, slots in plans]
    chosen = max(range(len(plans)), key=lambda i: ups[i].gb_per_s)
    test.slot_bytes, test.num_slots = plans[chosen]
    kind = "write-combined" if test.write_combined else "default"
    chunk_bytes = min(test.slot_bytes, TRANSFER_BYTES)
    rounds = 1 if quick else ROUNDS
    for direction, drive_link, copy_link in (("up", "drive_read", "h2d"), ("down", "drive_write", "d2h")):
        cap_bytes = None if direction == "up" else max_write_bytes
        lanes, drives = [], []
        for _ in range(rounds):  # in turns, since a drive's rate wanders from second to second
            drives.append(drive_limit(drive_link, cap_bytes))
            lanes.append(lane_rate(direction, test.slot_bytes, test.num_slots).gb_per_s)
        drives.append(drive_limit(drive_link, cap_bytes))
        lane, drive = statistics.median(lanes), statistics.median(drives)
        memory = kind if direction == "up" else "default"
        with pool.lease(min(TRANSFER_BYTES, room_bytes), "link measurement", memory == "write-combined") as lease:
            copies = [
                m.gb_per_s
                for _ in range(2)  # a copy is only ever disturbed downwards: the better one counts
                for m in measure_copies(device, {memory: lease.tensor}, (chunk_bytes,), cell_s, cell_s / 2)
                if m.link == copy_link
            ]
        limits = {"drive": drive, "copy": max(copies, default=0.0)}
        slowest = min((name for name, rate in limits.items() if rate > 0), key=lambda name: limits[name], default="")
        overlap = lane / limits[slowest] if slowest else 0.0
        limit = f"{slowest} {limits[slowest]:.2f} GB/s" if slowest else "unknown"
        if direction == "up":
            test.up_gb_per_s, test.up_limit, test.up_overlap = lane, limit, overlap
        else:
            test.down_gb_per_s, test.down_limit, test.down_overlap = lane, limit, overlap
    return test


def measure_lane(
    pool: PinnedPool,
    engine: StorageEngine,
    file: BlockFile,
    direction: str,
    slots: LaneSettings,
    limit_s: float,
    max_bytes: int | None,
    transfer_bytes: int = TRANSFER_BYTES,
) -> Measurement:
    """drive_to_gpu ('up') or gpu_to_drive ('down') through a lane, two transfers always under way."""
    device = pool.device
    transfer_bytes = min(transfer_bytes, file.size_bytes // 2 // MIB * MIB or file.size_bytes)
    tensors = [torch.zeros(transfer_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    if direction == "down":
        for tensor in tensors:
            tensor.random_(0, 256)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    kind: Any = UploadLane if direction == "up" else DownloadLane
    lane = kind(pool, engine, device, slots, f"probe-{direction}")
    last_offset = file.size_bytes - transfer_bytes
    under_way: deque[tuple[Any, torch.Tensor]] = deque()
    offset = 0

    def send(tensor: torch.Tensor) -> None:
        nonlocal offset
        if direction == "up":
            under_way.append((lane.submit(file, offset, tensor, after=AT_ONCE), tensor))
        else:
            under_way.append((lane.submit(tensor, file, offset, after=AT_ONCE), tensor))
        offset = offset + transfer_bytes if offset + transfer_bytes <= last_offset else 0

    def step() -> int:
        transfer, tensor = under_way.popleft()
        moved_bytes = transfer.wait()
        send(tensor)
        return moved_bytes

    with lane:
        start_s = time.perf_counter()
        for tensor in tensors:
            send(tensor)
        moved_bytes, _ = timed(step, limit_s, max_bytes)
        moved_bytes += sum(transfer.wait() for transfer, _ in under_way)
        elapsed_s = time.perf_counter() - start_s
    link = "drive_to_gpu" if direction == "up" else "gpu_to_drive"
    target = f"{file.path.parent} -> {device}"
    return Measurement(link, target, "lanes", slots.slot_bytes, slots.num_slots, moved_bytes, elapsed_s)


def measure_pageable(pool: PinnedPool, device: torch.device, home: torch.Tensor, limit_s: float) -> Measurement:
    """pageable_to_gpu: `home` (1-D uint8 in ordinary RAM) through the slots of an upload lane, with a run's threads."""
    free_slots = pool.largest_free_bytes(False) // SLOT_BYTES
    slot_bytes = SLOT_BYTES if free_slots > 1 else pool.largest_free_bytes(False) // 2 // 4096 * 4096
    num_slots = max(2, min(PAGEABLE_SLOTS, free_slots))
    targets = [torch.empty_like(home, device=device) for _ in range(2)]
    with UploadLane(pool, None, device, LaneSettings(slot_bytes, num_slots), "probe-pageable") as lane:

        def step() -> int:
            return sum(transfer.wait() for transfer in [lane.submit_host(home, target) for target in targets])

        step()  # the first one faults pages in
        moved_bytes, elapsed_s = timed(step, limit_s)
    return Measurement("pageable_to_gpu", str(device), "lanes", slot_bytes, num_slots, moved_bytes, elapsed_s)
