"""Facts of a filesystem: its name, its direct-I/O alignment, and the calls Python's os module lacks.

Direct I/O needs offsets and sizes in multiples of the drive's logical block (512 or 4096 bytes). Linux >= 6.1 tells the
exact numbers per file (statx, STATX_DIOALIGN); older kernels through /sys; else 4096 is assumed, which is right for
every common drive because it is a multiple of 512."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FALLBACK_BLOCK_BYTES = 4096
# Filesystems that live in RAM: they accept O_DIRECT since Linux 6.6 but there is no drive to be direct with.
RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000  # linux/stat.h
_STATX_BYTES = 256
_STATX_DIO_MEM_ALIGN_AT = 0x98
_SYNC_FILE_RANGE_WAIT_BEFORE, _SYNC_FILE_RANGE_WRITE, _SYNC_FILE_RANGE_WAIT_AFTER = 1, 2, 4


@dataclass(frozen=True)
class DirectLimits:
    """Alignment that direct I/O on one open file needs."""

    supported: bool | None
    """True or False where the kernel tells, None where only a try can tell."""
    block_bytes: int
    """Offsets and sizes must be multiples of it."""
    memory_align_bytes: int
    """Addresses must be multiples of it."""
    source: str
    """Source of the numbers: where they come from: 'statx', 'sysfs' or 'assumed'."""


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    return ctypes.CDLL(None, use_errno=True)


def direct_limits(fd: int) -> DirectLimits:
    """The direct-I/O alignment of an open file."""
    told = _statx_limits(fd)
    if told is not None:
        return told
    block_bytes = _sysfs_block_bytes(os.fstat(fd).st_dev)
    if block_bytes is not None:
        return DirectLimits(None, block_bytes, max(block_bytes, 512), "sysfs")
    return DirectLimits(None, FALLBACK_BLOCK_BYTES, FALLBACK_BLOCK_BYTES, "assumed")


def _statx_limits(fd: int) -> DirectLimits | None:
    libc = _libc()
    if libc is None or not hasattr(libc, "statx"):
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return None
    (mask,) = struct.unpack_from("I", buffer, 0)
    if not mask & _STATX_DIOALIGN:
        return None
    memory_align_bytes, block_bytes = struct.unpack_from("II", buffer, _STATX_DIO_MEM_ALIGN_AT)
    if not memory_align_bytes or not block_bytes:
        return DirectLimits(False, FALLBACK_BLOCK_BYTES, FALLBACK_BLOCK_BYTES, "statx")
    return DirectLimits(True, max(512, block_bytes), memory_align_bytes, "statx")


def _sysfs_block_bytes(device: int) -> int | None:
    base = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (base / "queue", base / ".." / "queue"):  # a partition's queue is its parent's
        try:
            value = int((queue / "logical_block_size").read_text())
        except (OSError, ValueError):
            continue
        if value >= 512 and value & (value - 1) == 0:
            return value
    return None


def filesystem_of(path: str | os.PathLike[str]) -> tuple[str, str]:
    """(filesystem type, mount point) of an existing path, e.g. ('ext4', '/'); ('unknown', '/') where not told."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown", os.sep
    real = os.path.realpath(path)
    best = ("unknown", "")
    for line in lines:
        left, _, right = line.partition(" - ")
        mount_point = left.split()[4].encode().decode("unicode_escape")
        inside = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(best[1]):  # later mounts cover earlier ones
            best = (right.split()[0], mount_point)
    return best[0], best[1] or os.sep


def start_writeback(fd: int, offset: int, n_bytes: int) -> bool:
    """Ask the kernel to begin writing dirty cached pages of the range; False where the call does not exist."""
    return _sync_file_range(fd, offset, n_bytes, _SYNC_FILE_RANGE_WRITE)


def finish_writeback(fd: int, offset: int, n_bytes: int) -> bool:
    """Write the range's dirty pages and wait; not a durability promise (no metadata, no drive cache flush)."""
    flags = _SYNC_FILE_RANGE_WAIT_BEFORE | _SYNC_FILE_RANGE_WRITE | _SYNC_FILE_RANGE_WAIT_AFTER
    return _sync_file_range(fd, offset, n_bytes, flags)


def _sync_file_range(fd: int, offset: int, n_bytes: int, flags: int) -> bool:
    libc = _libc()
    if libc is None or not hasattr(libc, "sync_file_range"):
        return False
    result = libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(n_bytes), ctypes.c_uint(flags))
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return True


def drop_cached(fd: int, offset: int, n_bytes: int) -> None:
    """Give clean cached pages of the range back to the system; a hint, and nothing where it does not exist."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, n_bytes, os.POSIX_FADV_DONTNEED)
