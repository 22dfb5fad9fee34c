"""`PosixFile`: one open file by POSIX calls, direct (O_DIRECT) where that is asked for and possible.

Each call is one system call that may move less than asked; `Descriptor` settles that. Raises OSError."""

from __future__ import annotations

import errno as errno_module
import os
import stat
import sys
from pathlib import Path
from typing import Literal

import numpy as np

from outcore.common.quantities import MIB
from outcore.storage.filesystem import DirectLimits, direct_limits

Mode = Literal["r", "rw", "create"]

_CANNOT_RESERVE = (errno_module.EOPNOTSUPP, errno_module.EINVAL, errno_module.ENOSYS)


class PosixFile:
    """An open file. `direct`: whether it was opened so; `refused`: why not, where it was asked for."""

    def __init__(self, path: Path, mode: Mode, *, direct: bool) -> None:
        self._path = path
        flags = {"r": os.O_RDONLY, "rw": os.O_RDWR, "create": os.O_RDWR | os.O_CREAT | os.O_TRUNC}[mode] | os.O_CLOEXEC
        direct_flag = getattr(os, "O_DIRECT", 0) if direct else 0
        self.refused = None if direct_flag or not direct else f"{sys.platform} has no O_DIRECT"
        try:
            self.fd = os.open(path, flags | direct_flag, 0o644)
        except OSError as error:
            if not direct_flag or error.errno not in (errno_module.EINVAL, errno_module.EOPNOTSUPP):
                raise
            self.fd = os.open(path, flags, 0o644)
            direct_flag, self.refused = 0, "the filesystem refuses O_DIRECT"
        self.direct = bool(direct_flag)

    def is_regular(self) -> bool:
        """True for a regular file: no folder, pipe or device."""
        return stat.S_ISREG(os.fstat(self.fd).st_mode)

    def limits(self) -> DirectLimits:
        """Alignment that direct transfers of this file need."""
        return direct_limits(self.fd)

    def read(self, span: np.ndarray, at: int) -> int:
        """Read into `span` from byte `at`; how many bytes came, 0 at the end of the file."""
        return os.preadv(self.fd, [span.data], at)

    def write(self, span: np.ndarray, at: int) -> int:
        """Write `span` at byte `at`; how many bytes were taken."""
        return os.pwritev(self.fd, [span.data], at)

    def go_buffered(self) -> None:
        """Clear O_DIRECT on the open descriptor: transfers in flight on other threads just go on."""
        import fcntl

        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def size_bytes(self) -> int:
        return os.fstat(self.fd).st_size

    def resize(self, size_bytes: int) -> None:
        """Set the file's size."""
        os.ftruncate(self.fd, size_bytes)

    def reserve(self, start: int, end: int) -> None:
        """Have the filesystem set blocks aside for [start, end), or write zeros where it cannot."""
        # Not on the direct descriptor: where the C library emulates the call it writes single bytes.
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(fd, start, end - start)
                    return
                except OSError as error:
                    if error.errno not in _CANNOT_RESERVE:
                        raise
            zeros = bytes(MIB)
            at = start
            while at < end:
                at += os.pwrite(fd, zeros[: end - at], at)
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Bring what was written to the drive."""
        os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)
