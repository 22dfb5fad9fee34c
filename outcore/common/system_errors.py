"""Refusals of the operating system, in words for people: in which phase, which path, what it means, what to do.

Every OSError that a user reads comes from here. `file_errors` surrounds work on files and turns a bare error into a
`FileError`; libraries in Rust (tokenizers, safetensors) raise plain exceptions that only quote the system's number, and
these are understood as well. `explain_error` is the last resort for an error that nobody has turned into words yet."""

from __future__ import annotations

import contextlib
import errno as errno_module
import os
import re
from collections.abc import Iterator
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
    errno_module.ENOENT: "the path is wrong, or the drive that holds it is not mounted",
    errno_module.EEXIST: "something of that name is there already",
    errno_module.ENOTDIR: "a part of the path is a file, not a directory",
    errno_module.EISDIR: "the path is a directory, a file is needed",
    errno_module.ENOTEMPTY: "the folder is not empty: somebody else writes there",
    errno_module.EXDEV: "the two paths are on different filesystems",
    errno_module.EBUSY: "the file or folder is in use (a mount point, or another process)",
    errno_module.ETXTBSY: "the file is being executed",
    errno_module.ENAMETOOLONG: "the path is longer than the filesystem allows: choose shorter names",
    errno_module.ELOOP: "too many links that lead to links",
    errno_module.ENODEV: "the device is gone: was the drive removed or reset?",
    errno_module.ENXIO: "the device does not answer: was the drive removed or reset?",
    errno_module.ESTALE: "the network share lost the file (stale handle): mount it again",
    errno_module.ETIMEDOUT: "the drive or the network share did not answer in time",
    errno_module.ECANCELED: "the request was cancelled before it began",
    errno_module.EBADF: "the file is closed or not open for this kind of access",
    errno_module.EINVAL: "the filesystem refused the request's alignment or arguments",
    errno_module.EAGAIN: "the system stayed short of resources although the request was repeated",
    errno_module.EMFILE: "this process has too many open files: raise `ulimit -n`",
    errno_module.ENFILE: "the whole system has too many open files: end other programs, or raise `fs.file-max`",
    errno_module.ENOMEM: (
        "the system has no memory (or no address space) left for the request: look at `free -h` and `ulimit -v`, end "
        "other programs, or keep less in RAM"
    ),
    errno_module.EOPNOTSUPP: "the filesystem does not support this operation",
    errno_module.ENOSYS: "this system does not have the operation",
    errno_module.ENOLCK: "the system has no file locks left, or the network share has none",
}
_RUST_NUMBER = re.compile(r"\(os error (\d+)\)")
NO_THREAD = "can't start new thread"


def describe_errno(number: int | None) -> str:
    """'EIO, Input/output error: the drive or its link ...'; 'no system error' for None."""
    if number is None:
        return "no system error"
    name = errno_module.errorcode.get(number, f"errno {number}")
    meaning = _MEANINGS.get(number)
    return f"{name}, {os.strerror(number)}" + (f": {meaning}" if meaning else "")


class FileError(OSError):
    """The system refused work on a file. `phase`: what was being done, `path`: where (None: the error did not say)."""

    def __init__(self, phase: str, path: str | os.PathLike[str] | None, errno: int | None, words: str = "") -> None:
        self.phase = phase
        self.path = None if path is None else Path(path)
        self.words = words or describe_errno(errno)
        super().__init__(errno, self.words)
        self.filename = None if path is None else str(path)

    def __str__(self) -> str:
        return f"{self.phase}: {self.path}: {self.words}" if self.path is not None else f"{self.phase}: {self.words}"

    def __reduce__(self) -> tuple:
        return type(self), (self.phase, self.path, self.errno, self.words)


def system_number(error: BaseException) -> int | None:
    """The system's number behind an exception: of an OSError, or quoted in the words of a library in Rust."""
    if isinstance(error, OSError):
        return error.errno
    found = _RUST_NUMBER.search(str(error))
    return int(found[1]) if found else None


def as_file_error(error: BaseException, phase: str, path: str | os.PathLike[str] | None = None) -> FileError | None:
    """The error as a FileError; None where it is no error of the system, or already says what it is about.

    `path` is used where the error names none itself."""
    if is_explained(error):
        return None
    number = system_number(error)
    if number is None:
        return None
    named = error.filename if isinstance(error, OSError) else None
    return FileError(phase, os.fsdecode(named) if named is not None and not isinstance(named, int) else path, number)


def is_explained(error: BaseException) -> bool:
    """Whether the error carries its own words for people: an OSError of a class of this package does."""
    return isinstance(error, OSError) and type(error).__module__.startswith("outcore.")


@contextlib.contextmanager
def file_errors(phase: str, path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Work on files: an error of the system leaves as a FileError that names phase and path."""
    try:
        yield
    except Exception as error:
        told = as_file_error(error, phase, path)
        if told is None:
            raise
        raise told from error


def explain_error(error: BaseException, phase: str) -> str | None:
    """Words for an error that reached the end of the program; None where it is none of the system's.

    `phase`: what the program was doing."""
    if is_explained(error):
        return str(error)
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):
        return (
            f"{phase}: the system refused a new thread: too many processes or threads of this user (`ulimit -u`, or "
            "the container's pids limit), or no memory for its stack. Raise the limit or end other programs"
        )
    if isinstance(error, MemoryError):
        return f"{phase}: {describe_errno(errno_module.ENOMEM)}"
    told = as_file_error(error, phase)
    return None if told is None else str(told)
