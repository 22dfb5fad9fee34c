"""The files of a tensor store: per directory one lock and one preallocated data file.

The lock (flock on `store.lock`) ends with the process that holds it, however it ends."""

from __future__ import annotations

import errno as errno_module
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from outcore.common.os_layer import lock_file, space_bytes
from outcore.common.quantities import format_gb
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
