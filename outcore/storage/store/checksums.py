"""`Checksums`: CRC-32 of each chunk of each tensor, kept beside the data and verified as it comes back.

A chunk wholly written in one request is summed from memory on the thread that wrote it. One written in part is marked
stale and summed from the drive at the next commit. A read verifies every chunk that it covers wholly. CRC-32 (zlib)
detects what drives and torn writes do to data; it runs at 1.7 GB/s per thread (measured on a server core) outside the
GIL, in parallel on the engine's threads."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from outcore.common.quantities import MIB
from outcore.storage.errors import StorageError

CHUNK_BYTES = MIB


class Checksums:
    """The chunk sums of one tensor of `n_bytes`. Safe from several threads."""

    def __init__(
        self,
        name: str,
        n_bytes: int,
        chunk_bytes: int,
        locate: Callable[[int], tuple[Path, int]],
        known: tuple[int | None, ...] | None = None,
    ) -> None:
        self.name = name
        self._locate = locate
        self.n_bytes = n_bytes
        self.chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._sums: list[int | None] = list(known) if known is not None else [None] * -(-n_bytes // chunk_bytes)
        self._stale: set[int] = set()

    def _chunk_end(self, chunk: int) -> int:
        return min((chunk + 1) * self.chunk_bytes, self.n_bytes)

    def _whole_chunks(self, start: int, stop: int) -> Iterator[int]:
        """Chunks that lie wholly in the tensor's bytes [start, stop)."""
        for chunk in range(-(-start // self.chunk_bytes), -(-stop // self.chunk_bytes)):
            if self._chunk_end(chunk) <= stop:
                yield chunk

    def takes(self, section: int) -> bool:
        """Every section is verified."""
        return True

    def cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Chunks that a read or a write cuts in two are not verified."""
        return []

    def mark(self, start: int, stop: int) -> None:
        """A write of [start, stop) begins: what was known about its chunks no longer holds."""
        with self._lock:
            for chunk in range(start // self.chunk_bytes, -(-stop // self.chunk_bytes)):
                self._sums[chunk] = None
                self._stale.add(chunk)

    def written(self, data: np.ndarray, start: int) -> None:
        """`data` now lies at byte `start` of the tensor."""
        for chunk in self._whole_chunks(start, start + data.nbytes):
            value = zlib.crc32(data[chunk * self.chunk_bytes - start : self._chunk_end(chunk) - start].data)
            with self._lock:
                self._sums[chunk] = value
                self._stale.discard(chunk)

    def verify(self, data: np.ndarray, start: int) -> None:
        """Check `data` read from byte `start`. Raises StorageError naming tensor and chunk."""
        for chunk in self._whole_chunks(start, start + data.nbytes):
            expected = self._sums[chunk]
            if expected is None:
                continue
            found = zlib.crc32(data[chunk * self.chunk_bytes - start : self._chunk_end(chunk) - start].data)
            if found != expected and self._sums[chunk] == expected:
                path, offset = self._locate(chunk * self.chunk_bytes)
                reason = (
                    f"bytes {chunk * self.chunk_bytes} to {self._chunk_end(chunk)} have checksum {found:08x} where "
                    f"{expected:08x} was written: the drive returned other bytes than it was given, or the run was "
                    "killed after overwriting them and before the next commit"
                )
                raise StorageError(f"verification of {self.name!r}", path=path, offset=offset, reason=reason)

    def stale_ranges(self) -> list[tuple[int, int]]:
        """Chunks whose sums must be taken from the drive, as byte ranges."""
        with self._lock:
            return [(chunk * self.chunk_bytes, self._chunk_end(chunk)) for chunk in sorted(self._stale)]

    def values(self) -> tuple[int | None, ...]:
        with self._lock:
            return tuple(self._sums)
