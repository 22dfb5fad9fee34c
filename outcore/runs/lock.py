"""One process writes a run: a lock that the kernel frees when its holder dies, and that names its holder.

The lock is `flock` on `.<run>.lock` beside the run's folders, one in each parent folder that the run writes to, so that
two runs that share only their logs are kept apart as well. The files are no sign of a run: a `kill -9` leaves them
behind, free. Children that a run forks do not hold its lock. Cost: a file or three, no waiting."""

from __future__ import annotations

import errno
import json
import os
import platform
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from outcore.common import os_layer
from outcore.common.os_layer import lock_file, unlock_file

NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of `flock` on file systems without locks (some network mounts)."""

ASKED_S = 10.0
"""Seconds that those who only ask for the holder may be in the way: microseconds, unless kept from running."""

NAMED_S = 2.0
"""Seconds that a holder may take from its lock to its name."""


class RunInUse(ValueError):
    """Another process is writing this run; the message names it."""


class RunLock:
    """Held from `take` until `release`, or until the process ends in whatever way."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._held: dict[Path, int] = {}
        self.made: list[Path] = []
        """Folders that were made for the lock, innermost first: those still empty at the end are removed again."""
        holder = weakref.ref(self)
        # An inherited descriptor would keep the lock held for as long as a forked child lives.
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=lambda: (lock := holder()) is not None and lock._forget())

    @classmethod
    def take(cls, run_name: str, parents: Iterable[Path], say: Callable[[str], None] = print) -> RunLock:
        """Lock the run in each of `parents`, which exist. RunInUse, at once, when another process has it."""
        lock = cls(run_name)
        try:
            for path in sorted({lock_path(parent.resolve(), run_name) for parent in parents}):
                lock._take_one(path, say)
        except BaseException:
            lock.release()
            raise
        return lock

    def _take_one(self, path: Path, say: Callable[[str], None]) -> None:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _lock(descriptor)
            except BlockingIOError:
                os.close(descriptor)
                raise RunInUse(in_use_words(self._run_name, path)) from None
            except OSError as error:
                os.close(descriptor)
                if error.errno not in NO_LOCKS_HERE:
                    raise OSError(error.errno, error.strerror, str(path)) from error
                say(f"WARNING: {path.parent} has no file locks ({error.strerror}): nothing keeps a second run of this "
                    "name from writing there.")  # fmt: skip
                return
            if _is_at(path, descriptor):
                break
            os.close(descriptor)  # its last holder removed the file between our opening and locking it
        self._held[path] = descriptor
        holder = {"pid": os.getpid(), "host": platform.node(), "since_s": time.time()}
        try:
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, json.dumps(holder).encode())
        except OSError as error:  # the lock holds without a name as well, and whoever needs the space says what to do
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(error.errno, error.strerror, str(path)) from error

    def release(self) -> None:
        """Free the run and remove the lock's files. Again: does nothing."""
        for path, descriptor in self._held.items():
            if os_layer.IS_WINDOWS:  # which removes no file that is open; one that another opened meanwhile stays
                os.close(descriptor)
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                continue
            path.unlink(missing_ok=True)  # while it is locked: whoever opened it before sees that it is gone
            os.close(descriptor)
        self._held.clear()
        for folder in self.made:
            with suppress(OSError):  # not empty
                folder.rmdir()
        self.made.clear()

    def _forget(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


def _lock(descriptor: int) -> None:
    """Lock, or BlockingIOError when another process holds the run. Whoever only asks (`holder_of`) is waited for."""
    until_s = time.monotonic() + ASKED_S
    while True:
        try:
            return lock_file(descriptor)
        except BlockingIOError:
            lock_file(descriptor, shared=True)  # beside those who ask, not beside a holder
            unlock_file(descriptor)
            if time.monotonic() > until_s:
                raise
            time.sleep(0.001)


def lock_path(parent: Path, run_name: str) -> Path:
    """The lock's file of a run in one of the folders that hold runs."""
    return parent / f".{run_name}.lock"


def holder_of(path: Path) -> dict[str, Any] | None:
    """Read who holds a lock's file: pid, host and since_s ({} while the holder is writing them); None: nobody."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        lock_file(descriptor, shared=True)
        return None
    except BlockingIOError:
        return _read(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def in_use_words(run_name: str, path: Path) -> str:
    """One sentence for whoever comes second, and what to do."""
    until_s = time.monotonic() + NAMED_S
    while not (who := _read_path(path)) and time.monotonic() < until_s:
        time.sleep(0.001)
    words = f"process {who['pid']} on {who['host']}" if who else "another process"
    return (
        f"run {run_name} is being written by {words}: two processes would destroy each other's checkpoints. Wait for "
        "it, stop it (it saves first), or choose another --run_name."
    )


def _read_path(path: Path) -> dict[str, object]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return {}
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> dict[str, object]:
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        holder = json.loads(os.read(descriptor, 4096))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) and {"pid", "host"} <= holder.keys() else {}


def _is_at(path: Path, descriptor: int) -> bool:
    mine = os.fstat(descriptor)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
