"""Reads from the drive straight into GPU memory through kvikio: 'gds' where it was proved direct, else 'kvikio'.

Measured beside the staged lanes, so that the faster path is chosen by figures and not by its name."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from outcore.common.quantities import MIB
from outcore.probe.bench.measurement import Measurement, timed
from outcore.probe.gds.facts import GdsFacts
from outcore.probe.gds.verdict import PathVerdict
from outcore.storage import BlockFile, StorageEngine, Transfer, open_engine

BATCH_BYTES = 64 * MIB
# Measured: kvikio into GPU memory reaches the drive's rate with 16 threads of 8 MiB, 40 % of it with its defaults.
DIRECT_THREADS = 16
DIRECT_TASK_BYTES = 8 * MIB


def open_direct_engine(verdict: PathVerdict, facts: GdsFacts) -> tuple[str, StorageEngine | None, str]:
    """(name, engine, reason): an engine that reads into device memory, or None and why there is none."""
    name = "gds" if verdict.is_direct else "kvikio"
    if not facts.kvikio_version:
        return name, None, "kvikio is not installed"
    if facts.auto.status != "ok" and not verdict.is_direct:
        return name, None, f"kvikio's read failed: {facts.auto.detail or facts.auto.status}"
    try:
        engine = open_engine("kvikio", num_threads=DIRECT_THREADS, task_bytes=DIRECT_TASK_BYTES, gds=verdict.is_direct)
    except (RuntimeError, OSError) as error:
        return name, None, str(error)
    return name, engine, ""


def measure_direct(engine: Any, name: str, file: BlockFile, device: torch.device, limit_s: float) -> Measurement:
    """The rate of `engine` into memory of `device`, two batches always under way."""
    batch_bytes = min(BATCH_BYTES, file.size_bytes // 2 // MIB * MIB)
    buffers = [torch.empty(batch_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    under_way: deque[tuple[Transfer, torch.Tensor]] = deque()
    offset = 0

    def send(buffer: torch.Tensor) -> None:
        nonlocal offset
        under_way.append((engine.submit_read(file, offset, buffer), buffer))
        offset = offset + batch_bytes if offset + 2 * batch_bytes <= file.size_bytes else 0

    def step() -> int:
        transfer, buffer = under_way.popleft()
        moved_bytes = transfer.wait()
        send(buffer)
        return moved_bytes

    start_s = time.perf_counter()
    for buffer in buffers:
        send(buffer)
    moved_bytes, _ = timed(step, limit_s)
    moved_bytes += sum(transfer.wait() for transfer, _ in under_way)
    elapsed_s = time.perf_counter() - start_s
    target = f"{file.path.parent} -> {device}"
    return Measurement("drive_to_gpu", target, name, DIRECT_TASK_BYTES, DIRECT_THREADS, moved_bytes, elapsed_s)
