"""Calls that POSIX and Windows make in different ways: locks, places in files, signals to others, limits. The one file
that asks which of both this is; a call that one of them lacks is made here, or in `storage`'s two kinds of files.

Windows' ways were tried with a stand-in for its modules and under wine, not on real Windows."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

IS_WINDOWS = os.name == "nt"
LOCKED_AT = 1 << 40
"""Place of the byte that is locked on Windows, where a locked byte can be neither read nor written."""
SHARED_MEMORY = Path("/dev/shm")
REPLACED_WITHIN_S = 2.0
"""Seconds that others (a reader, a virus scanner) may hold a file that is to be replaced on Windows."""


def lock_file(descriptor: int, *, shared: bool = False) -> None:
    """Lock an open file until `unlock_file`, its closing or the process's end, without waiting.

    BlockingIOError where another holds it. Windows has no shared locks here: those who ask exclude each other."""
    if not IS_WINDOWS:
        import fcntl

        return fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    try:
        _locking(descriptor, "LK_NBLCK")
    except OSError as error:
        if error.errno != errno.EACCES:
            raise
        raise BlockingIOError(errno.EAGAIN, "locked by another process") from error


def unlock_file(descriptor: int) -> None:
    """Give a lock back before the file is closed."""
    if IS_WINDOWS:
        return _locking(descriptor, "LK_UNLCK")
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_UN)


def _locking(descriptor: int, how: str) -> None:
    msvcrt: Any = importlib.import_module("msvcrt")
    before = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, LOCKED_AT, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, getattr(msvcrt, how), 1)
    finally:
        os.lseek(descriptor, before, os.SEEK_SET)


def remove_own_buffer(rank: int, folder: Path = SHARED_MEMORY) -> None:
    """Remove the name of this rank's buffer, where there is one; once every rank has opened it: they wait for it.

    DeepSpeed's collectives on the CPU leave it: 0.19.8 creates
    /dev/shm/deepspeed_allreduce_buffer_<user>_<address>_<port>_<rank> (csrc/cpu/comm/shm.cpp), 66 MB a rank and run,
    and never removes it. A name that is gone takes nothing from ranks that map the buffer."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address and port and not IS_WINDOWS:
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}"
        (folder / name).unlink(missing_ok=True)


def read_at(descriptor: int, n_bytes: int, at: int) -> bytes:
    """Bytes from `at` on, fewer at the file's end. On Windows one thread at a time may read a descriptor: its place is
    moved, and moved back."""
    if not IS_WINDOWS:
        return os.pread(descriptor, n_bytes, at)
    before = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        os.lseek(descriptor, at, os.SEEK_SET)
        return os.read(descriptor, n_bytes)
    finally:
        os.lseek(descriptor, before, os.SEEK_SET)


def space_bytes(path: Path) -> int:
    """Space that a file takes on its drive; its size on Windows, which does not tell. Raises OSError."""
    status = os.stat(path)
    return status.st_size if IS_WINDOWS else status.st_blocks * 512


def sync_flags() -> int:
    """Flags to open a file that is to be synced: Windows syncs none that may only be read."""
    return os.O_RDWR if IS_WINDOWS else os.O_RDONLY


def replace_file(new: Path, old: Path) -> None:
    """Give `new` the name of `old`, which goes. Windows refuses while another has `old` open: it is asked again for
    `REPLACED_WITHIN_S`. Raises OSError."""
    until_s = time.monotonic() + (REPLACED_WITHIN_S if IS_WINDOWS else 0)
    while True:
        try:
            return os.replace(new, old)
        except PermissionError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(0.02)


def stop_signals() -> list[signal.Signals]:
    """Signals that ask a process to stop: Ctrl-C, SIGTERM, and a terminal that is closed (SIGHUP) or, on Windows,
    Ctrl-Break."""
    return [signal.SIGINT, signal.SIGTERM, _of_both("SIGBREAK", "SIGHUP")]


def _of_both(windows: str, posix: str) -> signal.Signals:
    return getattr(signal, windows if IS_WINDOWS else posix)


class ApartOptions(TypedDict, total=False):
    """Arguments of `subprocess.Popen` for a process apart, which differ by system."""

    creationflags: int
    start_new_session: bool


def apart_options() -> ApartOptions:
    """Options of `subprocess.Popen`: a process that this terminal's Ctrl-C does not reach, and `ask_to_stop` does."""
    if IS_WINDOWS:
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined]  (Windows only)
    return {"start_new_session": True}


def ask_to_stop(pid: int, number: signal.Signals = signal.SIGINT) -> None:
    """Have a process that was started with `apart_options` finish what it does and end: by this signal, on Windows by
    Ctrl-Break, the only one that a group of its own hears, in the same console. ProcessLookupError where it is gone;
    OSError on Windows where it has another console."""
    os.kill(pid, _of_both("CTRL_BREAK_EVENT", number.name))


def kill_with_children(process: subprocess.Popen[Any]) -> None:
    """End a process that was started with `apart_options`, and what it started (on Windows itself only). It may be
    gone."""
    with contextlib.suppress(ProcessLookupError):
        if IS_WINDOWS:
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def before_exec(do: Callable[[], Any]) -> dict[str, Any]:
    """Option of `subprocess.Popen`: what the child does before it becomes the program. Windows has no such moment."""
    return {} if IS_WINDOWS else {"preexec_fn": do}


def limit_memory(most_bytes: int) -> None:
    """This process's memory from now on, and no core dump of it. Nothing on Windows, or where a lower limit stands."""
    if IS_WINDOWS:
        return
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def most_open_files() -> int | None:
    """Count of files and connections that this process may have open; None on Windows, which sets no such limit."""
    if IS_WINDOWS:
        return None
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def most_locked_bytes() -> int | None:
    """Bytes that this process may pin (`ulimit -l`); None: no limit of its own, as on Windows."""
    if IS_WINDOWS:
        return None
    import resource

    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft
