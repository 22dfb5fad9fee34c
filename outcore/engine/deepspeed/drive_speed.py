"""How fast is the drive behind this folder?

Writes one file and reads it back past the page cache through `outcore.storage`, in blocks of 8 MiB over several
threads as training does; bounded in bytes, seconds and share of the free space; the file is removed. Without direct
transfers the result says that it may be RAM's.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from outcore.common.quantities import GB, MIB, format_gb, format_rate
from outcore.machine.offload import resolve_nvme_path, temporary_file
from outcore.storage import BlockFile, PosixEngine

MIN_GB_PER_S = 2.0
"""Below this rate offloading to the drive dominates every step (the product's threshold)."""


@dataclass(frozen=True)
class NvmePerformance:
    """Measured sequential rates of a drive, in decimal GB/s."""

    read_gb_per_s: float
    write_gb_per_s: float
    test_bytes: int
    direct: bool
    """True when the page cache was really bypassed; otherwise the read rate may be RAM's."""
    ok: bool
    """Both rates reach `MIN_GB_PER_S`."""
    message: str


def check_nvme_performance(
    path: str | os.PathLike[str], *, test_bytes: int = 1024 * MIB, max_s: float = 10.0, num_threads: int = 4
) -> NvmePerformance:
    """Measure write, then read, of one file in `path`; the file is removed.

    Stops writing after half of `max_s` (the file is then smaller) and never takes more than a quarter of the free
    space; blocks of 8 MiB over `num_threads` threads, the pattern of the training's own transfers.

    Raises:
        OSError: the folder cannot be written or read; ValueError: sizes or times out of range, unusable path.
    """
    chunk_bytes = 8 * MIB * num_threads
    if test_bytes < 8 * MIB or max_s <= 0 or num_threads < 1:
        raise ValueError(
            f"check_nvme_performance needs test_bytes >= {8 * MIB}, max_s > 0 and num_threads >= 1; "
            f"got {test_bytes}, {max_s}, {num_threads}."
        )
    folder = resolve_nvme_path(path)
    folder.mkdir(parents=True, exist_ok=True)
    allowed_bytes = shutil.disk_usage(folder).free // 4
    if allowed_bytes < 8 * MIB:
        raise OSError(errno.ENOSPC, f"less than {format_gb(32 * MIB)} free, too little to measure", str(folder))
    test_bytes = min(test_bytes, allowed_bytes) // (8 * MIB) * (8 * MIB)
    chunk_bytes = min(chunk_bytes, test_bytes)
    buffer = torch.randint(0, 256, (chunk_bytes,), dtype=torch.uint8)
    engine = PosixEngine(num_threads=num_threads, block_bytes=8 * MIB)
    try:
        with temporary_file(folder) as file:
            with BlockFile(file, mode="create", size_bytes=test_bytes) as block_file:
                direct = block_file.direct
                began_s = perf_counter()
                done_bytes = 0
                while done_bytes < test_bytes and (done_bytes == 0 or perf_counter() - began_s < max_s / 2):
                    part = buffer[: min(chunk_bytes, test_bytes - done_bytes)]
                    engine.submit_write(block_file, done_bytes, part).wait()
                    done_bytes += part.numel()
                block_file.sync()
                write_s = perf_counter() - began_s
            with BlockFile(file, mode="r") as block_file:
                direct = direct and block_file.direct
                began_s = perf_counter()
                read_bytes = 0
                while read_bytes < done_bytes and (read_bytes == 0 or perf_counter() - began_s < max_s / 2):
                    part = buffer[: min(chunk_bytes, done_bytes - read_bytes)]
                    engine.submit_read(block_file, read_bytes, part).wait()
                    read_bytes += part.numel()
                read_s = perf_counter() - began_s
    finally:
        engine.close()
    read, write = read_bytes / GB / read_s, done_bytes / GB / write_s
    return NvmePerformance(
        read, write, done_bytes, direct, min(read, write) >= MIN_GB_PER_S, _judge(folder, read, write, direct)
    )


def _judge(folder: Path, read: float, write: float, direct: bool) -> str:
    rates = f"{folder}: reads {format_rate(read * GB)}, writes {format_rate(write * GB)}"
    text = f"{rates}, measured {'past' if direct else 'through'} the page cache."
    if not direct:
        text += " The file system refused direct transfers, so the read rate may be RAM's, not the drive's."
    slow = [name for name, rate in (("reading", read), ("writing", write)) if rate < MIN_GB_PER_S]
    if slow:
        text += (
            f" Warning: {' and '.join(slow)} stay{'s' if len(slow) == 1 else ''} below {MIN_GB_PER_S:.0f} GB/s, so a "
            "step "
            "that offloads to this drive will wait for it most of the time. Use a PCIe 4.0 NVMe drive, or keep more "
            "in RAM."
        )
    return text
