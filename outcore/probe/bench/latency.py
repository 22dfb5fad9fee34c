"""How long one transfer from drive to device takes, 4 KiB to 16 MiB: plain copy, staged lane, kvikio or GDS.

'plain' is what a program does without this project: an ordinary cold read into pageable memory, then a copy. 'staged'
goes through an upload lane, 'kvikio'/'gds' through the engine of that name into device memory. Offsets are random and
out of the page cache. The brief expects about 30 % less latency than plain copies; `verdict` says whether that is so.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from outcore.common.quantities import KIB, MIB
from outcore.staging import AT_ONCE, UploadLane
from outcore.storage import BlockFile, StorageEngine

SIZES_BYTES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
EXPECTED_LOWER_PCT = 30.0
SEEN_FROM_PCT = 25.0
"""'About 30 %' counts as seen from a quarter on."""


@dataclass
class LatencyResult:
    """Median seconds by path and size."""

    median_s: dict[str, dict[int, float]] = field(default_factory=dict)
    repeats: int = 0

    def lower_pct(self, path: str, from_bytes: int = 0, below_bytes: int = 1 << 62) -> float | None:
        """How much lower than plain, in percent, negative for higher: geometric mean over the sizes in the range."""
        plain, other = self.median_s.get("plain", {}), self.median_s.get(path, {})
        sizes = [size for size in plain if size in other and from_bytes <= size < below_bytes]
        logs = [math.log(other[size] / plain[size]) for size in sizes]
        return 100.0 * (1.0 - math.exp(statistics.fmean(logs))) if logs else None

    def verdict(self) -> str:
        """One line about the expectation, for large transfers (which training makes) and for small ones."""
        parts = []
        for words, from_bytes, below_bytes in (("from 1 MiB up", MIB, 1 << 62), ("below 1 MiB", 0, MIB)):
            paths = (path for path in self.median_s if path != "plain")
            lower = {p: pct for p in paths if (pct := self.lower_pct(p, from_bytes, below_bytes)) is not None}
            if lower:
                path, pct = max(lower.items(), key=lambda item: item[1])
                word = "seen" if pct >= SEEN_FROM_PCT else "refuted"
                parts.append(f"{words} {word} ({path} {abs(pct):.0f} % {'lower' if pct >= 0 else 'higher'})")
        if not parts:
            return "latency against plain copies: not measured"
        return f"expected ~{EXPECTED_LOWER_PCT:.0f} % lower latency than plain copies: {'; '.join(parts)}"


def measure_latency(
    file: BlockFile,
    device: torch.device,
    lane: UploadLane,
    stage_s: float,
    repeats: int,
    direct_engines: dict[str, StorageEngine] | None = None,
    tick: Callable[[str], None] = lambda label: None,
) -> LatencyResult:
    """Medians over `repeats` transfers per path and size, fewer when the time runs out (never fewer than 3).

    direct_engines: engines that read into device memory, by the name they get in the result ('kvikio', 'gds').
    """
    sizes = [size for size in SIZES_BYTES if size <= file.size_bytes // 4]
    out = torch.empty(max(sizes), dtype=torch.uint8, device=device)
    pageable = torch.empty(max(sizes), dtype=torch.uint8)
    fd = os.open(file.path, os.O_RDONLY)

    def plain(offset: int, size: int) -> None:
        view = pageable[:size]
        got = os.preadv(fd, [view.numpy().data], offset)
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
            tick(f"latency {size // KIB} KiB")
            times: dict[str, list[float]] = {name: [] for name in paths}
            for turn in range(repeats + 1):
                for name, move in paths.items():
                    offset = chooser.randrange((file.size_bytes - size) // 4096 + 1) * 4096
                    if hasattr(os, "posix_fadvise"):
                        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
                    start_s = time.perf_counter()
                    move(offset, size)
                    if turn:  # the first is a warm-up
                        times[name].append(time.perf_counter() - start_s)
                if turn >= 3 and time.perf_counter() > deadline_s:
                    result.repeats = min(result.repeats, turn)
                    break
            for name, seconds in times.items():
                result.median_s[name][size] = statistics.median(seconds)
    finally:
        os.close(fd)
    return result
