"""The one exception of the storage room: which file, where, how much was wanted, how much moved, and what it means.

Every failed or short transfer becomes a `StorageError` on the thread that waits for it. The message carries the
operating system's number *and* its meaning in words with what to do, because "[Errno 27]" helps nobody at step 8,000.

`Transfer`: the receipt of one read or write under way, and `gather`, which makes one receipt out of several.

A transfer ends exactly once, with its byte count or with an exception, and by then nobody touches its buffer any more.
The exception is raised on the thread that waits, every time it waits. A transfer that is never waited for and failed is
logged, so that no failure passes unseen."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from outcore.common import describe_errno
from outcore.common.quantities import format_s


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


logger = logging.getLogger(__name__)

_SLICE_S = 1.0  # how often a wait without a limit looks whether the engine behind it still lives


class Transfer:
    """One submitted request. Made by engines; `wait` it or add a callback."""

    def __init__(self, n_bytes: int, what: str, is_alive: Callable[[], bool] | None = None) -> None:
        self.n_bytes = n_bytes
        self.what = what
        self._is_alive = is_alive
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._error_seen = False
        self._callbacks: list[Callable[[Transfer], object]] = []

    def wait(self, timeout_s: float | None = None) -> int:
        """Bytes moved, once all of them are. Raises what went wrong, or TimeoutError (the transfer goes on)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._finished.is_set():
            left_s = _SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())
            if left_s > 0 and self._finished.wait(left_s):
                break
            if deadline is not None and time.monotonic() >= deadline and not self._finished.is_set():
                raise TimeoutError(f"{self.what} is not finished after {format_s(timeout_s or 0.0)}; it goes on")
            if os.getpid() != self._pid:
                raise RuntimeError(
                    f"{self.what} was submitted before this process was forked: its threads exist only in the parent; "
                    "open stores and engines in the process that uses them"
                )
            if self._is_alive is not None and not self._is_alive() and not self._finished.wait(_SLICE_S):
                raise RuntimeError(f"{self.what} can never finish: the engine's threads are gone")
        if self._error is not None:
            self._error_seen = True
            raise self._error
        return self.n_bytes

    def done(self) -> bool:
        """True once the transfer has ended, well or badly."""
        return self._finished.is_set()

    @property
    def error(self) -> BaseException | None:
        """Failure of the transfer, None while it is under way or when all is well. Who reads it has taken notice."""
        self._error_seen = True
        return self._error

    def failure(self) -> BaseException | None:
        """Error as in `error`, for bookkeeping: it does not count as somebody having seen it."""
        return self._error

    def add_done_callback(self, fn: Callable[[Transfer], object]) -> None:
        """Call `fn(transfer)` when it ends, on the thread that ended it, or now if it has ended. `fn` must not block;
        an exception in it is logged, the transfer's own outcome stays."""
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(fn)
                return
        self._call(fn)

    def finish(self, error: BaseException | None = None) -> None:
        """End the transfer (called by engines). Only the first call counts."""
        with self._lock:
            if self._finished.is_set():
                return
            self._error = error
            callbacks, self._callbacks = self._callbacks, []
            self._finished.set()
        for fn in callbacks:
            self._call(fn)

    def _call(self, fn: Callable[[Transfer], object]) -> None:
        try:
            fn(self)
        except Exception:
            logger.exception("a callback of %s raised", self.what)

    def __del__(self) -> None:
        error = getattr(self, "_error", None)
        if error is not None and not self._error_seen:
            logger.error("nobody waited for a transfer that failed: %s", error)

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "done" if self._error is None else f"failed: {self._error}"
        return f"Transfer({self.what}, {state})"


def gather(
    parts: Sequence[Transfer], what: str, after_each: Sequence[Callable[[], object] | None] | None = None
) -> Transfer:
    """One transfer that ends when all `parts` have; the first failure is its failure.

    `after_each[i]` runs on the thread that finished part i, if that went well and before the whole counts as done: the
    place for checksums. What it raises fails the whole."""
    total = Transfer(sum(part.n_bytes for part in parts), what, parts[-1]._is_alive if parts else None)
    if not parts:
        total.finish()
        return total
    lock = threading.Lock()
    left = len(parts)
    first_error: BaseException | None = None

    def part_ended(part: Transfer, step: Callable[[], object] | None) -> None:
        nonlocal left, first_error
        error = part.error
        if error is None and step is not None:
            try:
                step()
            except Exception as raised:
                error = raised
        with lock:
            left -= 1
            first_error = first_error or error
            last = left == 0
        if last:
            total.finish(first_error)

    for index, part in enumerate(parts):
        step = after_each[index] if after_each is not None else None
        part.add_done_callback(lambda done, step=step: part_ended(done, step))
    return total
