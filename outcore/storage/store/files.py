"""The files of a tensor store: per directory one lock and one preallocated data file.

The lock (flock on `store.lock`) ends with the process that holds it, however it ends.

`StripeLayout`: one run of bytes dealt out over several files, stripe by stripe, as RAID 0 does.

A tensor of several stripes thus uses all drives at once. With one file every range is one piece.

`TensorSpec`: name, element type and shape of a stored tensor; `Entry` and `Extent`: where it lies."""

from __future__ import annotations

import errno as errno_module
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outcore.common.os_layer import lock_file, space_bytes
from outcore.common.quantities import format_gb, round_up
from outcore.storage.block_file import BlockFile
from outcore.storage.errors import StorageError, StoreInUse

DATA_NAME = "tensors.bin"
LOCK_NAME = "store.lock"
STORE_NAMES = ("manifest.json", ".manifest.json.part", DATA_NAME)
"""Files that `remove_files` removes; the first two are of stores that former versions made."""


class DirectoryLock:
    """An flock on a directory's lock file. Raises StoreInUse when another process or store object holds it."""

    def __init__(self, directory: Path, *, exclusive: bool) -> None:
        self.path = directory / LOCK_NAME
        while True:
            try:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise StorageError("lock of the store", path=self.path, errno=error.errno) from error
            try:
                lock_file(self._fd, shared=not exclusive)
                # A store deleted meanwhile took this lock file's name with it: then lock the new file of that name.
                if os.fstat(self._fd).st_nlink:
                    return
            except OSError as error:
                self.release()
                if error.errno not in (errno_module.EAGAIN, errno_module.EACCES):
                    raise StorageError("lock of the store", path=self.path, errno=error.errno) from error
                use = "writing" if exclusive else "reading"
                reason = (
                    f"the store is in use by another process (or another store object of this one), so it cannot be "
                    f"opened for {use}: wait until that run has ended, or choose another directory"
                )
                raise StoreInUse("lock of the store", path=directory, reason=reason) from error
            self.release()

    def release(self, *, remove: bool = False) -> None:
        if remove:
            self.path.unlink(missing_ok=True)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.release()


def lock_directories(directories: Sequence[Path], *, exclusive: bool) -> list[DirectoryLock]:
    """Lock all or none."""
    locks: list[DirectoryLock] = []
    try:
        for directory in directories:
            locks.append(DirectoryLock(directory, exclusive=exclusive))
    except BaseException:
        for lock in locks:
            lock.release()
        raise
    return locks


def check_space(directories: Sequence[Path], file_sizes: Sequence[int]) -> None:
    """Raise StorageError (ENOSPC) when the drives cannot hold the files; several directories may share a drive."""
    needed: dict[int, int] = {}
    where: dict[int, Path] = {}
    for directory, size_bytes in zip(directories, file_sizes, strict=True):
        device = os.stat(directory).st_dev
        old = directory / DATA_NAME  # left by a process that was killed: its space comes back
        size_bytes -= space_bytes(old) if old.exists() else 0
        needed[device] = needed.get(device, 0) + size_bytes
        where.setdefault(device, directory)
    for device, needed_bytes in needed.items():
        free_bytes = shutil.disk_usage(where[device]).free
        if needed_bytes > free_bytes:
            reason = (
                f"the store needs {format_gb(needed_bytes)} on this drive and {format_gb(free_bytes)} are free, "
                f"{format_gb(needed_bytes - free_bytes)} too few"
            )
            raise StorageError(
                "reservation of space",
                path=where[device],
                wanted=needed_bytes,
                got=free_bytes,
                errno=errno_module.ENOSPC,
                reason=reason,
            )


def create_files(directories: Sequence[Path], file_sizes: Sequence[int]) -> list[BlockFile]:
    """Make and preallocate the data files. After a failure none is left."""
    files: list[BlockFile] = []
    try:
        for directory, size_bytes in zip(directories, file_sizes, strict=True):
            files.append(BlockFile(directory / DATA_NAME, "create"))
            files[-1].preallocate(size_bytes)
    except BaseException:
        for file in files:
            file.close()
            file.path.unlink(missing_ok=True)
        raise
    return files


def remove_files(directories: Sequence[Path]) -> None:
    """Remove a store's files."""
    for directory in directories:
        for name in STORE_NAMES:
            try:
                (directory / name).unlink(missing_ok=True)
            except OSError as error:
                raise StorageError("delete", path=directory / name, errno=error.errno) from error


@dataclass(frozen=True)
class StripeLayout:
    """Byte ranges of the store -> byte ranges of its files."""

    num_files: int
    stripe_bytes: int
    """Bytes in a row on one file; whole blocks of a drive."""

    def pieces(self, start: int, n_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(file number, offset in that file, bytes) of [start, start + n_bytes), in order."""
        if self.num_files == 1:
            if n_bytes:
                yield 0, start, n_bytes
            return
        end = start + n_bytes
        while start < end:
            stripe, inside = divmod(start, self.stripe_bytes)
            row, file = divmod(stripe, self.num_files)
            take = min(self.stripe_bytes - inside, end - start)
            yield file, row * self.stripe_bytes + inside, take
            start += take

    def file_sizes(self, total_bytes: int) -> list[int]:
        """Bytes of each file that together hold `total_bytes`, whole stripes where there are several files."""
        if self.num_files == 1:
            return [total_bytes]
        rows, rest = divmod(round_up(total_bytes, self.stripe_bytes) // self.stripe_bytes, self.num_files)
        return [(rows + (number < rest)) * self.stripe_bytes for number in range(self.num_files)]


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of what is stored under one name. Raises ValueError for an empty name or a negative size."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"a stored tensor needs a non-empty name, got {self.name!r}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} has a negative size")

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """One tensor and its place in the store's byte range."""

    spec: TensorSpec
    start: int


@dataclass(frozen=True)
class Extent:
    """`n_bytes` of a tensor at byte `offset` of the file `path`."""

    path: Path
    offset: int
    n_bytes: int
