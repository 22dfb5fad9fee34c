"""A folder of arrays, written atomically and opened memory-mapped: the form of every cache of this room.

Written aside, fsynced, renamed into place, the manifest last. The manifest has each array's type, length and a
CRC-32 per 16 MiB block; a file beside the array has one per 16 KiB, for whoever reads it piece by piece (`checked`). On
opening, sizes are always compared, and checksums of all blocks up to 1 GiB, above that of 64 blocks spread evenly
(first and last included), so that opening a cache of any size takes about a second at most.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from outcore.common import describe_errno, fsync_folder, system_number
from outcore.common.listing import CHECKSUM, checksum_of
from outcore.common.quantities import GIB, MIB, format_gb
from outcore.data.basis import CacheError
from outcore.data.cache.checked import PIECE_BYTES, CheckedArray, Sums

MANIFEST = "manifest.json"
BLOCK_BYTES = 16 * MIB
VERIFY_WHOLE_UP_TO_BYTES = GIB
VERIFY_BLOCKS = 64


class DamagedArrays(Exception):
    """The folder is incomplete or its bytes are not what was written; the caller rebuilds it."""


class ArrayWriter:
    """Appends to one array file; knows its length and checksums."""

    def __init__(self, path: Path, dtype: np.dtype[Any], file: IO[bytes]) -> None:
        self.path, self.dtype, self.file = path, dtype, file
        self.length = 0
        self.blocks, self.pieces = Sums(BLOCK_BYTES), Sums(PIECE_BYTES)

    def append(self, values: np.ndarray) -> None:
        """Appends a 1-D array; CacheError when the drive is full."""
        if not len(values):
            return
        data = np.ascontiguousarray(values, dtype=self.dtype).data.cast("B")
        with explained(self.path.parent):
            self.file.write(data)
        self.length += len(values)
        self.blocks.add(data)
        self.pieces.add(data)

    def truncate(self, length: int) -> None:
        """Takes back what was appended beyond `length` (a document whose file turned out damaged half-way)."""
        kept_bytes = length * self.dtype.itemsize
        with explained(self.path.parent):
            self.file.flush()
            os.truncate(self.path, kept_bytes)
            self.file.seek(kept_bytes)
        self.length = length
        self.blocks.truncate(self.path, kept_bytes)
        self.pieces.truncate(self.path, kept_bytes)


@dataclass(frozen=True)
class Arrays:
    """Opened arrays (read-only memory maps by name) and the JSON that was stored with them."""

    path: Path
    arrays: Mapping[str, np.ndarray]
    meta: Mapping[str, Any]
    checksums: Mapping[str, Any]
    """Length and block checksums of each array: its content in short."""
    pieces: Mapping[str, np.ndarray]
    """Checksum of each 16 KiB of each array."""

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def checked(self, name: str) -> CheckedArray:
        """An array for reading throughout a run."""
        array = self.arrays[name]
        return CheckedArray(self.path / f"{name}.bin", array.dtype, len(array), self.pieces[name])


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
                pieces = np.asarray(writer.pieces.values, "<u4").tobytes()
                with open(self.aside / f"{name}.crc", "wb") as file:
                    file.write(pieces)
                    file.flush()
                    os.fsync(file.fileno())
                listing[name] = {
                    "dtype": writer.dtype.str,
                    "length": writer.length,
                    "crc32": list(writer.blocks.values),
                    "pieces_crc32": zlib.crc32(pieces),
                }
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
        pieces = {name: _open_pieces(path / f"{name}.crc", entry) for name, entry in listing.items()}
        return Arrays(path, arrays, manifest["meta"], checksums, pieces)
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


def _open_pieces(path: Path, entry: Mapping[str, Any]) -> np.ndarray:
    data = path.read_bytes()
    if zlib.crc32(data) != entry["pieces_crc32"]:
        raise DamagedArrays(f"{path}: has changed since it was written")
    return np.frombuffer(data, "<u4")


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
