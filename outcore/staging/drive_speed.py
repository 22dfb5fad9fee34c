"""Speed of the drive behind a folder, measured.

Writes one file and reads it back past the page cache through `outcore.storage`, in blocks of 8 MiB over several
threads as training does; bounded in bytes, seconds and share of the free space; the file is removed."""

from __future__ import annotations

import errno
import os
import shutil
from time import perf_counter
from typing import TypedDict

import torch

from outcore.common.quantities import GB, MIB, format_gb
from outcore.machine import drive_of
from outcore.machine.offload import resolve_nvme_path, slow_drive_warning, temporary_file
from outcore.storage import BlockFile, PosixEngine


class NvmePerformance(TypedDict):
    """Sequential rates of a drive in decimal GB/s, with warnings about them."""

    sequential_read_gb_s: float
    sequential_write_gb_s: float
    is_ssd: bool | None
    """True for an SSD; None where the system does not tell (virtual disks, network mounts)."""
    warnings: list[str]


def check_nvme_performance(
    path: str | os.PathLike[str], *, test_bytes: int = 1024 * MIB, max_s: float = 10.0, num_threads: int = 4
) -> NvmePerformance:
    """Measure write, then read, of one file in `path`; the file is removed.

    Stops writing after half of `max_s` (the file is then smaller) and never takes more than a quarter of the free
    space; blocks of 8 MiB over `num_threads` threads, the pattern of the training's own transfers.

    Raises:
        OSError: the folder cannot be written or read; ValueError: sizes or times out of range, unusable path."""
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
    warnings = [slow_drive_warning(folder, read, write)]
    if not direct:
        warnings.append(f"{folder} refuses direct transfers: the rates may be RAM's, not the drive's.")
    return performance(folder, read, write, warnings)


def performance(
    folder: str | os.PathLike[str], read_gb_per_s: float, write_gb_per_s: float, warnings: list[str]
) -> NvmePerformance:
    """The four keys, of rates that were measured just now or earlier; empty warnings are left out."""
    return NvmePerformance(
        sequential_read_gb_s=read_gb_per_s,
        sequential_write_gb_s=write_gb_per_s,
        is_ssd={"nvme": True, "ssd": True, "hdd": False}.get(drive_of(folder).kind),
        warnings=[warning for warning in warnings if warning],
    )
