"""The mount table of this process: which filesystem serves a path (/proc/self/mountinfo, proc(5)).

The `lock` file that torch makes in the folder of a C++ extension while it builds it, and waits for, for ever."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    device_number: str
    """'259:2', or '0:xx' for filesystems without one block device."""
    root: str
    mount_point: str
    options: tuple[str, ...]
    filesystem: str
    source: str
    super_options: tuple[str, ...]


def read_mounts(root: Path) -> list[Mount]:
    """Lines of proc/self/mountinfo under `root`; empty where there is none (Windows, macOS)."""
    try:
        text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if not separator or len(left) < 6 or len(right) < 2:
            continue
        mounts.append(
            Mount(
                device_number=left[2],
                root=_unescape(left[3]),
                mount_point=_unescape(left[4]),
                options=tuple(left[5].split(",")),
                filesystem=right[0],
                source=_unescape(right[1]),
                super_options=tuple(right[2].split(",")) if len(right) > 2 else (),
            )
        )
    return mounts


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount that serves an absolute path: the longest mount point above it, the latest of equals.

    None when nothing covers it (a chroot whose root is no mount point)."""
    best: Mount | None = None
    for mount in mounts:
        point = mount.mount_point.rstrip("/") + "/"
        covers = (path.rstrip("/") + "/").startswith(point)
        if covers and (best is None or len(mount.mount_point) >= len(best.mount_point)):
            best = mount
    return best


def _unescape(text: str) -> str:
    """mountinfo writes space, tab, newline and backslash as octal: '\\040' -> ' '."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


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
    """Paths that living processes work in or hold open, as far as this user may look."""
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
