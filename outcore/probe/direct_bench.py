"""Reads from the drive straight into GPU memory through kvikio: 'gds' where it was proved direct, else 'kvikio'.

Measured beside the staged lanes, so that the faster path is chosen by figures and not by its name.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from outcore.probe.facts import GdsFacts
from outcore.probe.measurement import Measurement, timed
from outcore.probe.verdict import Verdict
from outcore.storage import BlockFile, StorageEngine, Transfer, open_engine
from outcore.units import MIB

BATCH_BYTES = 64 * MIB


def open_direct_engine(
    verdict: Verdict, facts: GdsFacts, depth: int, block_bytes: int
) -> tuple[str, StorageEngine | None, str]:
    """(name, engine, reason): an engine that reads into device memory, or None and why there is none."""
    if not facts.kvikio_version:
        return "kvikio", None, "kvikio is not installed"
    if facts.auto.status != "ok" and not verdict.is_direct:
        return "kvikio", None, f"kvikio's read failed: {facts.auto.detail or facts.auto.status}"
    name = "gds" if verdict.is_direct else "kvikio"
    try:
        return name, open_engine("kvikio", num_threads=depth, block_bytes=block_bytes, gds=verdict.is_direct), ""
    except (RuntimeError, ImportError, OSError) as error:
        return name, None, str(error)


def measure_direct(
    engine: Any, name: str, file: BlockFile, device: torch.device, block_bytes: int, depth: int, limit_s: float
) -> Measurement:
    """The rate of `engine` into memory of `device`, two batches always under way."""
    batch_bytes = min(BATCH_BYTES, file.size_bytes // 2)
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

    for buffer in buffers:
        send(buffer)
    moved_bytes, elapsed_s = timed(step, limit_s)
    for transfer, _ in under_way:
        transfer.wait()
    return Measurement(
        "drive_to_gpu", f"{file.path.parent} -> {device}", name, block_bytes, depth, moved_bytes, elapsed_s
    )
