"""Errors that stop the set-up, in words for people: what happened, why, what to do."""

from __future__ import annotations

import errno

# Exit codes of `python setup.py`; 2 is argparse's.
EXIT_OK = 0
EXIT_NOT_READY = 1
EXIT_INSTALL_FAILED = 3
EXIT_INTERRUPTED = 130


class InstallError(RuntimeError):
    """The set-up cannot go on. `fix` is a command or one instruction."""

    def __init__(self, what: str, why: str, fix: str, exit_code: int = EXIT_INSTALL_FAILED) -> None:
        super().__init__(f"{what}\n  why: {why}\n  fix: {fix}")
        self.what, self.why, self.fix, self.exit_code = what, why, fix, exit_code


def from_os_error(error: OSError) -> InstallError:
    """A file operation that failed, in words."""
    path = error.filename or "a file"
    if error.errno == errno.ENOSPC:
        return InstallError(f"cannot write {path}", "the drive is full", "free some space, then run again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return InstallError(
            f"cannot write {path}",
            error.strerror or str(error),
            "run as the owner of this folder, or clone it where you may write",
        )
    return InstallError(f"a file operation on {path} failed", error.strerror or str(error), "mend that, then run again")
