"""An array on the drive that a run reads for days, a piece at a time, each held against its checksum as it is read.

A memory map would give whatever the drive holds by then: other bytes are trained on without a word, and a file that was
cut short ends the process by a signal. A piece that is not what was written is an error here. Cost: a row of 1,024
tokens reads and verifies one or two pieces of 16 KiB, some 20 us each."""

from __future__ import annotations

import os
import weakref
import zlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from outcore.common.os_layer import read_at

PIECE_BYTES = 16 * 1024


class DamagedCache(RuntimeError):
    """A cache changed on the drive while a run reads it; the run cannot go on, its checkpoints are whole."""


class Sums:
    """CRC-32 of each block of a file that is being written."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._in_block_bytes = 0
        self.values = array("I")

    def add(self, data: memoryview) -> None:
        """Take in the file's next bytes."""
        while len(data):
            if self._in_block_bytes == 0:
                self.values.append(0)
            taken = min(len(data), self._block_bytes - self._in_block_bytes)
            self.values[-1] = zlib.crc32(data[:taken], self.values[-1])
            self._in_block_bytes = (self._in_block_bytes + taken) % self._block_bytes
            data = data[taken:]

    def truncate(self, path: Path, kept_bytes: int) -> None:
        """Forget what lies beyond `kept_bytes` of the file."""
        del self.values[-(-kept_bytes // self._block_bytes) :]
        self._in_block_bytes = kept_bytes % self._block_bytes
        if self._in_block_bytes:
            with open(path, "rb") as again:
                again.seek(kept_bytes - self._in_block_bytes)
                self.values[-1] = zlib.crc32(again.read(self._in_block_bytes))


class CheckedArray:
    """One array, read by number or slice; `np.asarray` reads all of it. DamagedCache for bytes that were not written.

    The file stays open, so a cache that is removed, or built anew under its name, is read to the run's end."""

    def __init__(self, path: Path, dtype: np.dtype[Any], length: int, sums: np.ndarray) -> None:
        """`sums`: CRC-32 of each piece, uint32 [pieces]. OSError."""
        self._path, self._dtype, self._length, self._sums = path, dtype, length, sums
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._fd)
        self._latest: tuple[int, bytes] = (-1, b"")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, wanted: int | slice) -> Any:
        if isinstance(wanted, slice):
            first, last, _ = wanted.indices(self._length)
            return self._read(first, max(first, last))
        if not 0 <= wanted < self._length:
            raise IndexError(f"number {wanted} of {self._length}")
        return self._read(wanted, wanted + 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._read(0, self._length).astype(dtype or self._dtype, copy=bool(copy))

    def _read(self, first: int, last: int) -> np.ndarray:
        start, end = first * self._dtype.itemsize, last * self._dtype.itemsize
        pieces = range(start // PIECE_BYTES, -(-end // PIECE_BYTES))
        data = b"".join(self._piece(number) for number in pieces)
        return np.frombuffer(data, self._dtype, last - first, start % PIECE_BYTES if last > first else 0)

    def _piece(self, number: int) -> bytes:
        latest, data = self._latest
        if latest == number:
            return data
        try:
            data = read_at(self._fd, PIECE_BYTES, number * PIECE_BYTES)
        except OSError as error:
            raise DamagedCache(f"{self._path} cannot be read: {error.strerror}. {_WAY}") from error
        if zlib.crc32(data) != self._sums[number]:
            raise DamagedCache(f"{self._path}: bytes {number * PIECE_BYTES:,} and on have changed since. {_WAY}")
        self._latest = number, data
        return data


_WAY = (
    "Checkpoints are whole: remove this file's folder, which is built anew, and go on with the same command and "
    "--resume_from_checkpoint auto; then look at the drive (`dmesg`, `smartctl -a`)"
)
