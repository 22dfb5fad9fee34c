"""One builder at a time, without torch.distributed: a lock file per cache, which the kernel frees when its holder
dies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from outcore.common.quantities import format_s
from outcore.data.basis import CacheError
from outcore.data.cache.arrays import Arrays, ArraysWriter, DamagedArrays, explained, open_arrays

SAY_AFTER_S = 2.0


def open_or_build(
    path: Path,
    build: Callable[[ArraysWriter], dict[str, Any]],
    *,
    timeout_s: float,
    say: Callable[[str], None],
    what: str,
) -> tuple[Arrays, bool]:
    """(the arrays in `path`, whether they were there already); built under the lock if missing or damaged.

    `build` fills the writer and returns the meta to store. Raises CacheError (folder, drive, lock) and what `build`
    raises."""
    try:
        return open_arrays(path), True
    except FileNotFoundError:
        pass
    except DamagedArrays as error:
        say(f"the cache of {what} is damaged and will be rebuilt ({error})")
    with build_lock(path.with_name(f"{path.name}.lock"), timeout_s, say, what):
        try:  # another process may have built it while this one waited
            return open_arrays(path), True
        except (FileNotFoundError, DamagedArrays):
            pass
        with ArraysWriter(path) as writer:
            writer.commit(build(writer))
        try:
            return open_arrays(path), False
        except DamagedArrays as error:
            raise CacheError(
                f"the cache of {what} was just written and came back otherwise ({error}): do not trust the drive of "
                f"{path.parent} (look at `dmesg` and `smartctl -a`), set --data_cache_dir to another one"
            ) from error


@contextlib.contextmanager
def build_lock(path: Path, timeout_s: float, say: Callable[[str], None], what: str) -> Iterator[None]:
    """Holds `path` while the body runs.

    Waits up to `timeout_s` for another process (saying so after two seconds), then raises CacheError. Where the file
    system has no locks (some network mounts) the existence of the file is the lock."""
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(13, "Permission denied", str(path.parent))
    lock: BaseFileLock = FileLock(str(path))
    try:
        lock = _acquire(lock, timeout_s, say, what)
    except Timeout as error:
        raise CacheError(
            f"another process has been preparing {what} for more than {format_s(timeout_s)} (lock {path}). If it is "
            "still at work wait for it, or raise lock_timeout_s; if none is running, delete the lock file"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: BaseFileLock, timeout_s: float, say: Callable[[str], None], what: str) -> BaseFileLock:
    first_s = min(SAY_AFTER_S, timeout_s)
    try:
        lock.acquire(timeout=first_s)
    except NotImplementedError:
        lock = SoftFileLock(lock.lock_file)
        lock.acquire(timeout=timeout_s)
    except Timeout:
        if timeout_s <= first_s:
            raise
        say(f"waiting for another process that is preparing {what}")
        lock.acquire(timeout=timeout_s - first_s)
    except OSError as error:
        with explained(Path(lock.lock_file).parent):
            raise error
    return lock
