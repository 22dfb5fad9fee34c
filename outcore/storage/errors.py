"""The one exception of the storage room: which file, where, how much was wanted, how much moved, and what it means.

Every failed or short transfer becomes a `StorageError` on the thread that waits for it. The message carries the
operating system's number *and* its meaning in words with what to do, because "[Errno 27]" helps nobody at step 8,000.
"""

from __future__ import annotations

import os
from pathlib import Path

from outcore.common import describe_errno


class StorageError(OSError):
    """A transfer or file operation that did not do what was asked.

    Attributes: `path`, `offset` (bytes from the start of the file, None where it does not apply), `wanted` and `got`
    (bytes, None likewise), `errno` (the system's number or None, e.g. for the end of the file), `action`, `reason`."""

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


class ChangedBytes(StorageError):
    """A drive gave back other bytes than it was given."""


class StoreInUse(StorageError):
    """Another process, or another store object of this one, holds the lock of a store's folder."""


def _rebuild(kind: type[StorageError], action: str, state: dict) -> StorageError:
    return kind(action, **state)
