"""`Descriptor`: one open file, direct or buffered, and calls on it that move everything or say why not.

The kernel may move fewer bytes than asked, be interrupted, be short of resources for a moment, or refuse direct I/O
only at the first transfer. All of that is settled here: the layers above see whole spans or a `StorageError`.

`WriteBehind`: keeps the page cache small behind buffered writes.

Buffered writes only copy into RAM, and gigabytes of dirty pages would push the training process's own memory out. So
the kernel is asked to start writing each range at once, and ranges that are a window behind are waited for and dropped.
"""

from __future__ import annotations

import errno as errno_module
import threading
import time
import warnings
from collections import deque
from pathlib import Path

import numpy as np

from outcore.common import os_layer
from outcore.common.quantities import GIB, MIB
from outcore.storage.errors import StorageError
from outcore.storage.filesystem import (
    RAM_FILESYSTEMS,
    drop_cached,
    filesystem_of,
    finish_writeback,
    start_writeback,
)
from outcore.storage.posix_file import Mode, PosixFile
from outcore.storage.windows_file import WindowsFile

MAX_CALL_BYTES = GIB  # Linux moves at most 2 GiB - 4 KiB per call
MAX_STALLS = 8  # calls in a row that move nothing usable before the transfer counts as failed
MAX_BUSY_TRIES = 200  # EAGAIN: at most 2 s of waiting
BUSY_SLEEP_S = 0.01


class BufferedFallbackWarning(UserWarning):
    """Direct I/O is not possible on this filesystem; transfers go through the page cache."""


def system_file(path: Path, mode: Mode, *, direct: bool) -> PosixFile | WindowsFile:
    """Open a file as this system does it. Raises OSError."""
    return (WindowsFile if os_layer.IS_WINDOWS else PosixFile)(path, mode, direct=direct)


class Descriptor:
    """An open file, the system's as `file`. `direct`: what really happens. `block_bytes`, `memory_align_bytes`: needed
    by direct I/O."""

    def __init__(self, path: Path, mode: Mode, *, direct: bool) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self.file = system_file(path, mode, direct=direct)
        except OSError as error:
            raise StorageError("open", path=path, errno=error.errno) from error
        if not self.file.is_regular():
            self.file.close()
            raise StorageError("open", path=path, reason="not a regular file")
        limits = self.file.limits()
        self.block_bytes = limits.block_bytes
        self.memory_align_bytes = limits.memory_align_bytes
        self.direct = self.file.direct
        if self.file.refused is not None:
            self._say_buffered(self.file.refused)
        elif self.direct and limits.supported is False:
            self._fall_back("the kernel reports no direct I/O for this file")
        elif self.direct and filesystem_of(path)[0] in RAM_FILESYSTEMS:
            self._fall_back("the filesystem lives in memory")

    def _fall_back(self, reason: str) -> None:
        """Transfers in flight on other threads just go on."""
        with self._lock:
            if not self.direct:
                return
            self.file.go_buffered()
            self.direct = False
        self._say_buffered(reason)

    def _say_buffered(self, reason: str) -> None:
        kind, mount_point = filesystem_of(self.path)
        # The text names the filesystem, not the file: Python's default filter then shows it once per filesystem.
        warnings.warn(
            f"{mount_point} ({kind}): transfers go through the page cache because {reason}; "
            "expect lower rates than with direct I/O (a local ext4 or xfs drive has it)",
            BufferedFallbackWarning,
            stacklevel=1,
        )

    # ------------------------------------------------------------------ transfers

    def read_span(self, span: np.ndarray, at: int, needed: int) -> int:
        """Read at least `needed` bytes into `span`, fewer only at the file's end; returns how many.

        In direct mode `span` and `at` must be whole blocks. Raises StorageError."""
        done = furthest = stalls = busy = 0
        while done < needed:
            try:
                moved = self.file.read(span[done : done + MAX_CALL_BYTES], at + done)
            except OSError as error:
                busy = self._after_error(error, "read", at + done, span.nbytes - done, busy)
                continue
            furthest = max(furthest, done + moved)
            before = done
            # Direct I/O goes on from a whole block; the part of a block already there is read once more.
            done = furthest if furthest >= needed or not self.direct else furthest - furthest % self.block_bytes
            stalls = 0 if done > before else stalls + 1
            if moved == 0 or stalls >= MAX_STALLS:
                break
        return furthest

    def write_span(self, span: np.ndarray, at: int) -> None:
        """Write all of `span`. In direct mode `span` and `at` must be whole blocks. Raises StorageError."""
        done = stalls = busy = 0
        while done < span.nbytes:
            try:
                moved = self.file.write(span[done : done + MAX_CALL_BYTES], at + done)
            except OSError as error:
                busy = self._after_error(error, "write", at + done, span.nbytes - done, busy)
                continue
            before = done
            done += moved
            if self.direct and done < span.nbytes:
                done -= done % self.block_bytes  # write the broken block again rather than continue unaligned
            stalls = 0 if done > before else stalls + 1
            if stalls >= MAX_STALLS:
                raise StorageError(
                    "write",
                    path=self.path,
                    offset=at,
                    wanted=span.nbytes,
                    got=done,
                    reason="the system took no more bytes and gave no reason",
                )

    def _after_error(self, error: OSError, action: str, at: int, wanted: int, busy: int) -> int:
        """Decide whether a failed call is worth repeating; raises StorageError where not. EINTR never arrives here."""
        if error.errno == errno_module.EAGAIN and busy < MAX_BUSY_TRIES:
            time.sleep(BUSY_SLEEP_S)
            return busy + 1
        if error.errno == errno_module.EINVAL and self.direct:
            self._fall_back("the filesystem accepts direct I/O at open but refuses direct transfers")
            return busy
        raise StorageError(action, path=self.path, offset=at, wanted=wanted, got=0, errno=error.errno) from error


WINDOW_BYTES = 64 * MIB  # written bytes per file that may stay in the cache
DROP_FROM_BYTES = MIB  # smaller reads leave their pages: dropping them costs more than keeping them
_NO_CONTROL = (errno_module.ESPIPE, errno_module.EINVAL, errno_module.ENOSYS, errno_module.EOPNOTSUPP)


class WriteBehind:
    """Record of the ranges that a buffered file has written lately."""

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self.window_bytes = window_bytes
        self._lock = threading.Lock()
        self._ranges: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self._works = True

    def after_write(self, fd: int, offset: int, n_bytes: int) -> None:
        """Call after each write. Raises OSError when writing the older pages back failed."""
        if not self._works:
            return
        try:
            self._works = start_writeback(fd, offset, n_bytes)
        except OSError as error:
            if error.errno not in _NO_CONTROL:
                raise
            self._works = False  # no page cache control on this filesystem
        if not self._works:
            return
        with self._lock:
            self._ranges.append((offset, n_bytes))
            self._bytes += n_bytes
            old = []
            while self._bytes > self.window_bytes and len(self._ranges) > 1:
                old.append(self._ranges.popleft())
                self._bytes -= old[-1][1]
        for old_offset, old_bytes in old:
            finish_writeback(fd, old_offset, old_bytes)
            drop_cached(fd, old_offset, old_bytes)

    def after_read(self, fd: int, offset: int, n_bytes: int) -> None:
        """Call after each read."""
        if n_bytes >= DROP_FROM_BYTES:
            drop_cached(fd, offset, n_bytes)
