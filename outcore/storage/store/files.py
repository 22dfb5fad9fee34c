"""The files of a tensor store: per directory one lock and one preallocated data file with a header that names it.

The lock (flock on `store.lock`) is exclusive for a writer and shared for readers, and ends with the process that holds
it, however it ends. The header at the start of each data file carries the store's id and the file's number, so that
drives given in another order, or files of another store, are found out before a byte is read."""

from __future__ import annotations

import errno as errno_module
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from outcore.common import fsync_folder
from outcore.common.files import lock_file
from outcore.common.quantities import KIB, format_gb
from outcore.storage.block_file import BlockFile
from outcore.storage.errors import StorageError, StoreInUse
from outcore.storage.host_buffer import aligned_bytes
from outcore.storage.store.manifest import FILE_NAME as MANIFEST_NAME
from outcore.storage.store.manifest import FORMAT, VERSION

HEADER_BYTES = 64 * KIB  # one page of the largest logical block that Linux supports; data begins behind it
HEADER_TEXT_BYTES = 4096
DATA_NAME = "tensors.bin"
LOCK_NAME = "store.lock"
STORE_NAMES = (MANIFEST_NAME, f".{MANIFEST_NAME}.part", DATA_NAME)
"""Files that `remove_files` removes."""


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


def check_vacant(directories: Sequence[Path]) -> None:
    """Raise StorageError where a store, or a part of one whose manifest lies on another drive, would be overwritten."""
    for directory in directories:
        if (directory / MANIFEST_NAME).exists():
            reason = "a store is here already: open it, delete it, or choose another directory"
            raise StorageError("creation of the store", path=directory, reason=reason)
        header = _read_header(directory / DATA_NAME) if (directory / DATA_NAME).exists() else None
        # File 1 of a store without its manifest beside it was never finished, and may go. Any other may be in use.
        if header is not None and header["file"] != 0:
            reason = (
                f"this directory holds file {header['file'] + 1} of {header['files']} of store {header['store_id']}, "
                f"whose manifest is elsewhere: choose another directory, or remove {DATA_NAME} if that store is gone"
            )
            raise StorageError("creation of the store", path=directory, reason=reason)


def check_space(directories: Sequence[Path], file_sizes: Sequence[int]) -> None:
    """Raise StorageError (ENOSPC) when the drives cannot hold the files; several directories may share a drive."""
    needed: dict[int, int] = {}
    where: dict[int, Path] = {}
    for directory, size_bytes in zip(directories, file_sizes, strict=True):
        device = os.stat(directory).st_dev
        old = directory / DATA_NAME  # left by a store that was never finished: its space comes back
        size_bytes -= os.stat(old).st_blocks * 512 if old.exists() else 0
        needed[device] = needed.get(device, 0) + size_bytes
        where.setdefault(device, directory)
    for device, needed_bytes in needed.items():
        status = os.statvfs(where[device])
        free_bytes = status.f_bavail * status.f_frsize
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


def create_files(
    directories: Sequence[Path], file_sizes: Sequence[int], store_id: str, direct: bool
) -> list[BlockFile]:
    """Make and preallocate the data files and write their headers. After a failure none is left."""
    files: list[BlockFile] = []
    try:
        for number, (directory, size_bytes) in enumerate(zip(directories, file_sizes, strict=True)):
            files.append(BlockFile(directory / DATA_NAME, "create", direct=direct))
            files[-1].preallocate(size_bytes)
            files[-1].write_from(_header(store_id, number, len(directories)), 0)
            files[-1].sync()
            fsync_folder(directory)
    except BaseException:
        for file in files:
            file.close()
            file.path.unlink(missing_ok=True)
        raise
    return files


def open_files(
    directories: Sequence[Path], file_sizes: Sequence[int], store_id: str, *, writable: bool, direct: bool
) -> list[BlockFile]:
    """Open the data files, refusing a missing one, a wrong size, and one of another store or place."""
    files: list[BlockFile] = []
    try:
        for number, (directory, size_bytes) in enumerate(zip(directories, file_sizes, strict=True)):
            file = BlockFile(directory / DATA_NAME, "rw" if writable else "r", size_bytes, direct=direct)
            files.append(file)
            _check_header(file, store_id, number, len(directories))
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def remove_files(directories: Sequence[Path]) -> None:
    """Remove a store's files, its manifest first, so that an interrupted removal leaves nothing that looks whole."""
    for directory in directories:
        for name in STORE_NAMES:
            try:
                (directory / name).unlink(missing_ok=True)
            except OSError as error:
                raise StorageError("delete", path=directory / name, errno=error.errno) from error


def _header(store_id: str, number: int, count: int) -> memoryview:
    text = json.dumps({"format": FORMAT, "version": VERSION, "store_id": store_id, "file": number, "files": count})
    line = f"{zlib.crc32(text.encode()):08x} {text}\n".encode()
    header = aligned_bytes(HEADER_TEXT_BYTES)
    header[: len(line)] = list(line)
    return header.data


def _read_header(path: Path) -> dict | None:
    """The header of a data file, None when it has none that is whole."""
    try:
        with open(path, "rb") as file:
            line = file.read(HEADER_TEXT_BYTES).split(b"\n", 1)[0]
    except OSError as error:
        raise StorageError("read of a store's header", path=path, errno=error.errno) from error
    checksum, _, text = line.partition(b" ")
    return json.loads(text) if checksum == f"{zlib.crc32(text):08x}".encode() else None


def _check_header(file: BlockFile, store_id: str, number: int, count: int) -> None:
    found = _read_header(file.path)
    if found is None:
        raise StorageError("open of the store", path=file.path, reason="the header of the data file is damaged")
    if found["store_id"] != store_id:
        reason = f"the data file belongs to store {found['store_id']}, the manifest to {store_id}"
        raise StorageError("open of the store", path=file.path, reason=reason)
    if (found["file"], found["files"]) != (number, count):
        reason = (
            f"this is file {found['file'] + 1} of {found['files']} and was given as file {number + 1} of {count}: "
            "give the directories in the order the store was created with"
        )
        raise StorageError("open of the store", path=file.path, reason=reason)
