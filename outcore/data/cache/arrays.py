"""A folder of arrays, written atomically and opened memory-mapped: the form of every cache of this room.

Written aside, fsynced, renamed into place, the manifest last. The manifest has each array's type, length and a
CRC-32 per 16 MiB block. On opening, sizes are always compared, and checksums of all blocks up to 1 GiB, above that
of 64 blocks spread evenly (first and last included), so that opening a cache of any size takes about a second at most.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from outcore.common import describe_errno, fsync_folder, system_number
from outcore.common.listing import CHECKSUM, checksum_of
from outcore.common.quantities import GIB, MIB, format_gb
from outcore.data.basis import CacheError

MANIFEST = "manifest.json"
BLOCK_BYTES = 16 * MIB
VERIFY_WHOLE_UP_TO_BYTES = GIB
VERIFY_BLOCKS = 64


class DamagedArrays(Exception):
    """The folder is incomplete or its bytes are not what was written; the caller rebuilds it."""


@dataclass
class ArrayWriter:
    """Appends to one array file; knows its length and block checksums."""

    path: Path
    dtype: np.dtype[Any]
    file: IO[bytes]
    length: int = 0
    checksums: list[int] = field(default_factory=list)
    _in_block_bytes: int = 0

    def append(self, values: np.ndarray) -> None:
        """Appends a 1-D array; CacheError when the drive is full."""
        if not len(values):
            return
        data = np.ascontiguousarray(values, dtype=self.dtype).data.cast("B")
        with explained(self.path.parent):
            self.file.write(data)
        self.length += len(values)
        while len(data):
            if self._in_block_bytes == 0:
                self.checksums.append(0)
            taken = min(len(data), BLOCK_BYTES - self._in_block_bytes)
            self.checksums[-1] = zlib.crc32(data[:taken], self.checksums[-1])
            self._in_block_bytes = (self._in_block_bytes + taken) % BLOCK_BYTES
            data = data[taken:]

    def truncate(self, length: int) -> None:
        """Takes back what was appended beyond `length` (a document whose file turned out damaged half-way)."""
        with explained(self.path.parent):
            self.file.flush()
            os.truncate(self.path, length * self.dtype.itemsize)
            self.file.seek(length * self.dtype.itemsize)
        self.length = length
        kept = length * self.dtype.itemsize
        self.checksums = self.checksums[: kept // BLOCK_BYTES]
        self._in_block_bytes = kept % BLOCK_BYTES
        if self._in_block_bytes:
            with open(self.path, "rb") as again:
                again.seek(kept - self._in_block_bytes)
                self.checksums.append(zlib.crc32(again.read(self._in_block_bytes)))


@dataclass(frozen=True)
class Arrays:
    """Opened arrays (read-only memory maps by name) and the JSON that was stored with them."""

    path: Path
    arrays: Mapping[str, np.ndarray]
    meta: Mapping[str, Any]
    checksums: Mapping[str, Any]
    """Length and block checksums of each array: its content in short."""

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turns an error of the system while writing into a CacheError that says what to do, also one that a library in
    Rust only quotes."""
    try:
        yield
    except CacheError:
        raise
    except Exception as error:
        number = system_number(error)
        if number is None:
            raise
        if number in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(_existing(folder)).free
            raise CacheError(
                f"no space left for the token cache in {folder} ({format_gb(free)} free). Free some, or set "
                "--data_cache_dir to a drive with room (4 bytes a token: about the size of the text)"
            ) from error
        if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise CacheError(
                f"the token cache cannot be written in {folder}: {os.strerror(number)}. Set --data_cache_dir to a "
                "writable folder"
            ) from error
        raise CacheError(
            f"writing the token cache in {folder} failed: {describe_errno(number)}. Or set --data_cache_dir to another "
            "drive"
        ) from error


class ArraysWriter:
    """Writes a folder of arrays aside; `commit` puts it in place, leaving the context without it removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.aside = path.with_name(f"{path.name}.partial-{os.getpid()}")
        self._writers: dict[str, ArrayWriter] = {}
        self._open_files = contextlib.ExitStack()

    def __enter__(self) -> ArraysWriter:
        with explained(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for stale in self.path.parent.glob(
                f"{self.path.name}.partial-*"
            ):  # of a killed process; the caller has the lock
                shutil.rmtree(stale)
            self.aside.mkdir()
        return self

    def __exit__(self, *exc: object) -> None:
        # A full drive shows again when buffers are flushed; the files go anyway.
        with contextlib.suppress(OSError):
            self._open_files.close()
        if self.aside.exists():
            shutil.rmtree(self.aside, ignore_errors=True)

    def array(self, name: str, dtype: Any) -> ArrayWriter:
        path = self.aside / f"{name}.bin"
        with explained(self.path.parent):
            file = open(path, "wb")  # noqa: SIM115
            self._open_files.callback(file.close)
        writer = ArrayWriter(path, np.dtype(dtype).newbyteorder("<"), file)
        self._writers[name] = writer
        return writer

    def commit(self, meta: Mapping[str, Any]) -> None:
        """Makes the folder visible under its name, with `meta`, after everything is on the drive."""
        listing = {}
        with explained(self.path.parent):
            for name, writer in self._writers.items():
                writer.file.flush()
                os.fsync(writer.file.fileno())
                listing[name] = {"dtype": writer.dtype.str, "length": writer.length, "crc32": writer.checksums}
            self._open_files.close()
            with open(self.aside / MANIFEST, "w", encoding="utf-8") as file:
                body = json.loads(json.dumps({"arrays": listing, "block_bytes": BLOCK_BYTES, "meta": dict(meta)}))
                json.dump({**body, CHECKSUM: checksum_of(body)}, file)
                file.flush()
                os.fsync(file.fileno())
            fsync_folder(self.aside)
            if self.path.exists():
                shutil.rmtree(self.path)
            os.rename(self.aside, self.path)
            fsync_folder(self.path.parent)


def open_arrays(path: Path) -> Arrays:
    """The arrays in `path`, verified. FileNotFoundError: there is none. DamagedArrays: there is, but not whole."""
    if not path.is_dir():
        raise FileNotFoundError(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest.get(CHECKSUM) != checksum_of(manifest):
            raise DamagedArrays(f"{path / MANIFEST}: damaged, or of an older version: its checksum is wrong")
        listing, block_bytes = manifest["arrays"], int(manifest["block_bytes"])
        arrays = {name: _open_array(path / f"{name}.bin", entry, block_bytes) for name, entry in listing.items()}
        checksums = {name: [entry["length"], entry["crc32"]] for name, entry in listing.items()}
        return Arrays(path, arrays, manifest["meta"], checksums)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EIO, errno.ENOTDIR, errno.EISDIR):
            raise DamagedArrays(f"{path}: {describe_errno(error.errno)}") from error
        raise CacheError(
            f"the token cache {path} cannot be read: {describe_errno(error.errno)}. Or set another --data_cache_dir"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedArrays(f"{path}: {type(error).__name__}: {error}") from error


def _open_array(path: Path, entry: Mapping[str, Any], block_bytes: int) -> np.ndarray:
    dtype, length, checksums = np.dtype(entry["dtype"]), int(entry["length"]), list(entry["crc32"])
    size_bytes = path.stat().st_size
    if size_bytes != length * dtype.itemsize:
        raise DamagedArrays(f"{path} has {size_bytes} bytes, {length * dtype.itemsize} were written")
    if length == 0:
        return np.empty(0, dtype=dtype)
    blocks = np.arange(len(checksums))
    if size_bytes > VERIFY_WHOLE_UP_TO_BYTES:
        blocks = np.unique(np.linspace(0, len(checksums) - 1, VERIFY_BLOCKS).astype(int))
    if len(checksums) != -(-size_bytes // block_bytes):
        raise DamagedArrays(
            f"{path}: the manifest has {len(checksums)} checksums, {-(-size_bytes // block_bytes)} are due"
        )
    with open(path, "rb") as file:
        for block in blocks:
            file.seek(int(block) * block_bytes)
            if zlib.crc32(file.read(block_bytes)) != checksums[block]:
                raise DamagedArrays(f"{path}: block {block} has changed since it was written")
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,))


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
