"""Latency of one transfer from drive to device, 4 KiB to 16 MiB: plain copy, staged lane, kvikio or GDS.

'plain' is what a program does without this project: an ordinary cold read into pageable memory, then a copy. 'staged'
goes through an upload lane (from 1 MiB up), 'kvikio'/'gds' through the engine of that name into device memory. Offsets
are random and out of the page cache. About 30 % less latency than plain copies is expected; `verdict` says whether it
is so."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from outcore.common.quantities import KIB, MIB
from outcore.staging import AT_ONCE, UploadLane
from outcore.storage import BlockFile, StorageEngine, drop_cached, system_file

SIZES_BYTES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
EXPECTED_LOWER_PCT = 30.0
LANE_FROM_BYTES = MIB
"""Smaller ones take the plain path: a lane's turns of threads cost 0.5-1 ms, plain reads of 4 to 256 KiB 0.14-0.45 ms
(one H100). Layers are larger."""
SEEN_FROM_PCT = 25.0
"""'About 30 %' counts as seen from a quarter on."""


@dataclass
class LatencyResult:
    """Median seconds by path and size."""

    median_s: dict[str, dict[int, float]] = field(default_factory=dict)
    repeats: int = 0

    def lower_pct(self, path: str, from_bytes: int = 0) -> float | None:
        """Percent by which it is lower than plain, negative for higher: geometric mean from `from_bytes` on."""
        plain, other = self.median_s.get("plain", {}), self.median_s.get(path, {})
        sizes = [size for size in plain if size in other and size >= from_bytes]
        logs = [math.log(other[size] / plain[size]) for size in sizes]
        return 100.0 * (1.0 - math.exp(statistics.fmean(logs))) if logs else None

    def verdict(self) -> str:
        """One line about the expectation: for the path that training takes, then for the others."""
        parts = []
        for path in sorted(set(self.median_s) - {"plain"}, key=lambda name: name != "staged"):
            if (pct := self.lower_pct(path, LANE_FROM_BYTES)) is not None:
                words = "through the staged lanes that training takes" if path == "staged" else f"by {path}"
                found = f"{abs(pct):.0f} % {'lower' if pct >= 0 else 'higher'}"
                parts.append(f"{'seen' if pct >= SEEN_FROM_PCT else 'refuted'} {words} ({found})")
        if not parts:
            return "latency against plain copies: not measured"
        return (
            f"expected ~{EXPECTED_LOWER_PCT:.0f} % lower latency than plain copies, from 1 MiB up: {', '.join(parts)}; "
            "smaller transfers take the plain path"
        )


def measure_latency(
    file: BlockFile,
    device: torch.device,
    lane: UploadLane,
    stage_s: float,
    repeats: int,
    direct_engines: dict[str, StorageEngine] | None = None,
) -> LatencyResult:
    """Medians over `repeats` transfers per path and size, fewer when the time runs out (never fewer than 3).

    direct_engines: engines that read into device memory, by the name they get in the result ('kvikio', 'gds')."""
    sizes = [size for size in SIZES_BYTES if size <= file.size_bytes // 4]
    out = torch.empty(max(sizes), dtype=torch.uint8, device=device)
    pageable = torch.empty(max(sizes), dtype=torch.uint8)
    own = system_file(file.path, "r", direct=False)

    def plain(offset: int, size: int) -> None:
        view = pageable[:size]
        got = own.read(view.numpy(), offset)
        if got != size:
            raise OSError(f"short read of {got} of {size} bytes from {file.path}")
        out[:size].copy_(view)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    paths: dict[str, Callable[[int, int], object]] = {
        "plain": plain,
        "staged": lambda offset, size: lane.submit(file, offset, out[:size], after=AT_ONCE).wait(),
    }
    for name, engine in (direct_engines or {}).items():
        paths[name] = lambda offset, size, engine=engine: engine.submit_read(file, offset, out[:size]).wait()
    result = LatencyResult(median_s={name: {} for name in paths}, repeats=repeats)
    chooser = random.Random(0)
    deadline_s = time.perf_counter() + stage_s
    try:
        for size in sizes:
            times: dict[str, list[float]] = {name: [] for name in paths}
            for turn in range(repeats + 1):
                for name, move in paths.items():
                    if name == "staged" and size < LANE_FROM_BYTES:
                        continue
                    offset = chooser.randrange((file.size_bytes - size) // 4096 + 1) * 4096
                    drop_cached(own.fd, offset, size)
                    start_s = time.perf_counter()
                    move(offset, size)
                    if turn:  # the first is a warm-up
                        times[name].append(time.perf_counter() - start_s)
                if turn >= 3 and time.perf_counter() > deadline_s:
                    result.repeats = min(result.repeats, turn)
                    break
            for name, seconds in times.items():
                if not seconds:
                    continue
                result.median_s[name][size] = statistics.median(seconds)
    finally:
        own.close()
    return result
