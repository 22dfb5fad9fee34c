"""The `lock` file that torch makes in the folder of a C++ extension while it builds it, and waits for, for ever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

LOCK = "lock"


def remove_stale_lock(folder: Path, proc: Path = Path("/proc")) -> bool:
    """Remove the lock of a build that was killed; True when one was removed.

    A living build keeps its lock open, and has its `ninja` and compilers working in the folder: then the lock stays.
    Windows refuses to remove a file that is open."""
    lock = folder / LOCK
    try:
        made = lock.stat().st_ino
        if any(path in (lock.resolve(), folder.resolve()) for path in _in_use(proc)) or lock.stat().st_ino != made:
            return False
        lock.unlink()
    except OSError:  # there is none, or it cannot be removed
        return False
    return True


def remove_stale_locks(root: Path, proc: Path = Path("/proc")) -> list[str]:
    """Remove those of every extension below `root`, torch's folder of built extensions; names of the extensions.

    Below torch's own default folder there is one more level, for Python and CUDA."""
    locks = sorted([*root.glob(f"*/{LOCK}"), *root.glob(f"*/*/{LOCK}")])
    return [lock.parent.name for lock in locks if remove_stale_lock(lock.parent, proc)]


def _in_use(proc: Path) -> Iterator[Path]:
    """What living processes work in or hold open, as far as this user may look."""
    for process in proc.glob("[0-9]*"):
        try:
            links = [process / "cwd", *(process / "fd").iterdir()]
        except OSError:  # ended meanwhile, or of another user
            links = [process / "cwd"]
        for link in links:
            try:
                yield Path(os.readlink(link))
            except OSError:
                continue
