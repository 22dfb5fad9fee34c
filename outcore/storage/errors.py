"""The one exception of the storage room: which file, where, how much was wanted, how much moved, and what it means.

Every failed or short transfer becomes a `StorageError` on the thread that waits for it. The message carries the
operating system's number *and* its meaning in words with what to do, because "[Errno 27]" helps nobody at step 8,000.
"""

from __future__ import annotations

import errno as errno_module
import os
from pathlib import Path

# Meaning and remedy of the numbers that drives and filesystems really return.
_MEANINGS: dict[int, str] = {
    errno_module.ENOSPC: "the drive or its filesystem is full: free space there or choose another path",
    errno_module.EDQUOT: "your disk quota on that filesystem is used up: free space or have the quota raised",
    errno_module.EFBIG: (
        "the file would be larger than the filesystem or this process's file size limit allows: look at `ulimit -f`, "
        "or use a filesystem for large files (ext4, xfs; FAT32 stops at 4 GiB)"
    ),
    errno_module.EIO: (
        "the drive or its link reported a hardware error: look at `dmesg` and `smartctl -a`, and do not trust this "
        "drive with a long run until the cause is known"
    ),
    errno_module.EROFS: (
        "the filesystem is read-only (mounted so, or switched by the kernel after an error): "
        "look at `dmesg` and `mount`"
    ),
    errno_module.EACCES: "permission denied: choose a path this user may write, or change its owner or mode",
    errno_module.EPERM: "the operation is not permitted on this file (immutable flag, sealed or protected file)",
    errno_module.ENOENT: "no such file or directory",
    errno_module.ENOTDIR: "a part of the path is a file, not a directory",
    errno_module.EISDIR: "the path is a directory, a file is needed",
    errno_module.ENODEV: "the device is gone: was the drive removed or reset?",
    errno_module.ENXIO: "the device does not answer: was the drive removed or reset?",
    errno_module.ESTALE: "the network share lost the file (stale handle): mount it again",
    errno_module.ETIMEDOUT: "the drive or the network share did not answer in time",
    errno_module.ECANCELED: "the request was cancelled before it began",
    errno_module.EBADF: "the file is closed or not open for this kind of access",
    errno_module.EINVAL: "the filesystem refused the request's alignment or arguments",
    errno_module.EAGAIN: "the system stayed short of resources although the request was repeated",
    errno_module.EMFILE: "this process has too many open files: raise `ulimit -n`",
    errno_module.ENOMEM: "the system has no memory left for the request",
    errno_module.EWOULDBLOCK: "the system stayed short of resources although the request was repeated",
    errno_module.EOPNOTSUPP: "the filesystem does not support this operation",
}


def describe_errno(number: int | None) -> str:
    """'EIO, Input/output error: the drive or its link ...'; 'no system error' for None."""
    if number is None:
        return "no system error"
    name = errno_module.errorcode.get(number, f"errno {number}")
    meaning = _MEANINGS.get(number)
    return f"{name}, {os.strerror(number)}" + (f": {meaning}" if meaning else "")


class StorageError(OSError):
    """A transfer or file operation that did not do what was asked.

    Attributes: `path`, `offset` (bytes from the start of the file, None where it does not apply), `wanted` and `got`
    (bytes, None likewise), `errno` (the system's number or None, e.g. for the end of the file), `action`, `reason`.
    """

    def __init__(
        self,
        action: str,
        *,
        path: str | os.PathLike[str] | None = None,
        offset: int | None = None,
        wanted: int | None = None,
        got: int | None = None,
        errno: int | None = None,
        reason: str | None = None,
    ) -> None:
        self.action = action
        self.path = None if path is None else Path(path)
        self.offset = offset
        self.wanted = wanted
        self.got = got
        self.reason = reason
        super().__init__(errno, self._compose(errno))

    def _compose(self, errno: int | None) -> str:
        where = "" if self.path is None else f" {self.path}"
        if self.offset is not None:
            where += f" at offset {self.offset}"
        amount = ""
        if self.wanted is not None:
            amount = f": wanted {self.wanted} bytes, got {0 if self.got is None else self.got}"
        why = [] if self.reason is None else [self.reason]
        if errno is not None:
            why.append(describe_errno(errno))
        return f"{self.action} failed:{where}{amount}" + (f"; {'; '.join(why)}" if why else "")

    def __str__(self) -> str:
        return self._compose(self.errno)

    def __reduce__(self) -> tuple:
        state = {name: getattr(self, name) for name in ("path", "offset", "wanted", "got", "errno", "reason")}
        return _rebuild, (type(self), self.action, state)


class StoreInUse(StorageError):
    """Another process, or another store object of this one, holds the lock of a store's folder."""


def _rebuild(kind: type[StorageError], action: str, state: dict) -> StorageError:
    return kind(action, **state)
