"""`WindowsFile`: what `PosixFile` is, by Windows' calls: unbuffered (FILE_FLAG_NO_BUFFERING), overlapped.

An overlapped call carries its own offset, so threads share one handle as they share a descriptor under POSIX; each
thread waits for its own event. Unbuffered transfers need whole blocks of the drive in offset, size and address: 4096 is
taken, a multiple of every common drive's. A file may be removed or renamed while it is open, as under POSIX.
Not tried on real Windows."""

from __future__ import annotations

import ctypes
import errno as errno_module
import os
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from outcore.common.quantities import MIB
from outcore.storage.filesystem import FALLBACK_BLOCK_BYTES, DirectLimits
from outcore.storage.posix_file import Mode

GENERIC_READ, GENERIC_WRITE = 0x80000000, 0x40000000
SHARE_READ_WRITE_DELETE = 7
CREATE_ALWAYS, OPEN_EXISTING = 2, 3
FLAG_OVERLAPPED, FLAG_NO_BUFFERING = 0x40000000, 0x20000000
FILE_TYPE_DISK = 1
ALLOCATION_INFO, END_OF_FILE_INFO = 5, 6  # FILE_INFO_BY_HANDLE_CLASS
ERROR_INVALID_PARAMETER, ERROR_HANDLE_EOF, ERROR_IO_PENDING = 87, 38, 997
INVALID_HANDLE = ctypes.c_void_p(-1).value
ERRNOS = {
    1: errno_module.ENOSYS, 50: errno_module.ENOSYS, 120: errno_module.ENOSYS,
    2: errno_module.ENOENT, 3: errno_module.ENOENT, 4: errno_module.EMFILE, 5: errno_module.EACCES,
    8: errno_module.ENOMEM, 19: errno_module.EROFS, 21: errno_module.ENXIO, 32: errno_module.EBUSY,
    39: errno_module.ENOSPC, 55: errno_module.ENODEV, 64: errno_module.ESTALE, 87: errno_module.EINVAL,
    112: errno_module.ENOSPC, 206: errno_module.ENAMETOOLONG, 223: errno_module.EFBIG, 1167: errno_module.ENODEV,
    1295: errno_module.EDQUOT, 1450: errno_module.EAGAIN, 1453: errno_module.EAGAIN,
}  # fmt: skip
"""Windows' error -> POSIX' number (winerror.h); any other one is EIO, and its own number is in the words."""


class Overlapped(ctypes.Structure):
    """OVERLAPPED of minwinbase.h."""

    _fields_ = (
        ("internal", ctypes.c_void_p),
        ("internal_high", ctypes.c_void_p),
        ("offset", ctypes.c_uint32),
        ("offset_high", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    )


@lru_cache(maxsize=1)
def kernel32() -> Any:
    """The system's library, with the types of the calls made here."""
    library = getattr(ctypes, "WinDLL")("kernel32", use_last_error=True)  # noqa: B009  (exists on Windows only)
    p, u32 = ctypes.c_void_p, ctypes.c_uint32
    for name, returns, arguments in (
        ("CreateFileW", p, (ctypes.c_wchar_p, u32, u32, p, u32, u32, p)),
        ("CreateEventW", p, (p, ctypes.c_int, ctypes.c_int, p)),
        ("ReadFile", ctypes.c_int, (p, p, u32, p, p)),
        ("WriteFile", ctypes.c_int, (p, p, u32, p, p)),
        ("GetOverlappedResult", ctypes.c_int, (p, p, p, ctypes.c_int)),
        ("GetFileType", u32, (p,)),
        ("GetFileSizeEx", ctypes.c_int, (p, p)),
        ("SetFileInformationByHandle", ctypes.c_int, (p, ctypes.c_int, p, u32)),
        ("FlushFileBuffers", ctypes.c_int, (p,)),
        ("CloseHandle", ctypes.c_int, (p,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = returns, arguments
    return library


def last_error() -> int:
    """Number of what the last call on this thread was refused for."""
    return getattr(ctypes, "get_last_error")()  # noqa: B009  (exists on Windows only)


class WindowsFile:
    """An open file. `direct`: whether it was opened so; `refused`: why not, where it was asked for. Raises OSError."""

    fd = -1
    """Windows has no calls that steer the page cache by descriptor and range; who makes them skips it."""

    def __init__(self, path: Path, mode: Mode, *, direct: bool) -> None:
        self._path, self._system, self._own = path, kernel32(), threading.local()
        self._access = GENERIC_READ | (0 if mode == "r" else GENERIC_WRITE)
        how = CREATE_ALWAYS if mode == "create" else OPEN_EXISTING
        self.direct, self.refused = direct, None
        try:
            self._handle = self._open(how, direct)
        except OSError as error:
            if not direct or error.errno != errno_module.EINVAL:
                raise
            self._handle = self._open(how, False)
            self.direct, self.refused = False, "the filesystem refuses unbuffered files"
        self._former: int | None = None

    def _open(self, how: int, direct: bool) -> int:
        flags = FLAG_OVERLAPPED | (FLAG_NO_BUFFERING if direct else 0)
        path = os.path.abspath(self._path)
        handle = self._system.CreateFileW(path, self._access, SHARE_READ_WRITE_DELETE, None, how, flags, None)
        if handle in (None, INVALID_HANDLE):
            raise self._refusal()
        return handle

    def _refusal(self, number: int | None = None) -> OSError:
        number = last_error() if number is None else number
        errno = ERRNOS.get(number, errno_module.EIO)
        return OSError(errno, f"{os.strerror(errno)} (Windows error {number})", str(self._path))

    def is_regular(self) -> bool:
        """True for a file of a drive: no pipe or device. A folder is not opened at all."""
        return self._system.GetFileType(self._handle) == FILE_TYPE_DISK

    def limits(self) -> DirectLimits:
        """Alignment that unbuffered transfers need: Windows tells it by volume; this fits every common drive."""
        return DirectLimits(None, FALLBACK_BLOCK_BYTES, FALLBACK_BLOCK_BYTES, "assumed")

    def read(self, span: np.ndarray, at: int) -> int:
        """Read into `span` from byte `at`; how many bytes came, 0 at the end of the file."""
        return self._move(self._system.ReadFile, span, at)

    def write(self, span: np.ndarray, at: int) -> int:
        """Write `span` at byte `at`; how many bytes were taken."""
        return self._move(self._system.WriteFile, span, at)

    def _move(self, call: Any, span: np.ndarray, at: int) -> int:
        event = getattr(self._own, "event", None)
        if event is None:
            event = self._own.event = _Event(self._system, self._refusal)
        over = Overlapped(None, None, at & 0xFFFFFFFF, at >> 32, event.handle)
        moved, handle = ctypes.c_uint32(), self._handle
        # The call may return at once while the drive works: buffer and structure stay until the result is there.
        is_done = call(handle, span.ctypes.data, span.nbytes, None, ctypes.byref(over))
        number = 0 if is_done else last_error()
        if number in (0, ERROR_IO_PENDING):
            is_done = self._system.GetOverlappedResult(handle, ctypes.byref(over), ctypes.byref(moved), True)
            number = 0 if is_done else last_error()
        if number == ERROR_HANDLE_EOF:
            return 0
        if number:
            raise self._refusal(number)
        return moved.value

    def go_buffered(self) -> None:
        """Go on through a buffered handle. Transfers in flight end on the former one, which stays open until `close`;
        read-only or not, the file is not emptied again."""
        self._former, self._handle = self._handle, self._open(OPEN_EXISTING, False)

    def size_bytes(self) -> int:
        size = ctypes.c_int64()
        self._check(self._system.GetFileSizeEx(self._handle, ctypes.byref(size)))
        return size.value

    def resize(self, size_bytes: int) -> None:
        """Set the file's size. Bytes that were never written read as zeros."""
        self._tell(END_OF_FILE_INFO, size_bytes)

    def reserve(self, start: int, end: int) -> None:
        """Set blocks aside up to `end`, refused where the drive is full, and make the file so long; zeros are written
        where the filesystem cannot set aside (as under wine)."""
        try:
            self._tell(ALLOCATION_INFO, end)
        except OSError as error:
            if error.errno != errno_module.ENOSYS:
                raise
            with open(self._path, "r+b") as file:
                file.seek(start)
                for at in range(start, end, MIB):
                    file.write(bytes(min(MIB, end - at)))
        self._tell(END_OF_FILE_INFO, end)

    def _tell(self, kind: int, size_bytes: int) -> None:
        value = ctypes.c_int64(size_bytes)
        self._check(self._system.SetFileInformationByHandle(self._handle, kind, ctypes.byref(value), 8))

    def sync(self) -> None:
        """Bring what was written to the drive; a file that was opened to be read has nothing to bring."""
        if self._access & GENERIC_WRITE:
            self._check(self._system.FlushFileBuffers(self._handle))

    def _check(self, is_done: int) -> None:
        if not is_done:
            raise self._refusal()

    def close(self) -> None:
        for handle in (self._former, self._handle):
            if handle is not None:
                self._system.CloseHandle(handle)


class _Event:
    """A thread's event, closed with the thread."""

    def __init__(self, system: Any, refusal: Any) -> None:
        self._system, self.handle = system, system.CreateEventW(None, True, False, None)
        if not self.handle:
            raise refusal()

    def __del__(self) -> None:
        if self.handle:
            self._system.CloseHandle(self.handle)
