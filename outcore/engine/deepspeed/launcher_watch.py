"""A worker ends when its launcher does: after `kill -9` nobody else ends it, and it would train beside its successor.

A thread looks twice a second whether the launcher is still this process's parent, and whether the `deepspeed` command
is still the launcher's. If not, the process gets SIGTERM: the run finishes its step and saves. It is ended for good
after GRACE_S, should it hang in a collective whose peers are gone. A run that nobody launched has nobody to watch:
`nohup python train_model.py &` outlives its shell."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

EVERY_S = 0.5
GRACE_S = 300.0
EXIT_CODE = 128 + signal.SIGTERM


def launchers() -> tuple[psutil.Process, ...]:
    """This process's parent, and the `deepspeed` command above it where there is one."""
    parent = psutil.Process().parent()
    if parent is None:
        return ()
    above = parent.parent()
    is_ours = above is not None and above.pid != 1 and "deepspeed" in " ".join(_command(above))
    return (parent, above) if above is not None and is_ours else (parent,)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def watch_launcher(local_rank: int, end: Callable[[], None] | None = None) -> threading.Thread | None:
    """Start watching when a launcher started this process; None when nobody did.

    `local_rank`: what the `deepspeed` launcher passes; torchrun is known by its environment."""
    if os.name == "nt" or (local_rank < 0 and "TORCHELASTIC_RUN_ID" not in os.environ):
        return None
    watched = launchers()
    thread = threading.Thread(target=_watch, args=(watched, end or _end), name="launcher watch", daemon=True)
    thread.start()
    return thread


def _watch(watched: tuple[psutil.Process, ...], end: Callable[[], None]) -> None:
    parent_pid = os.getppid()
    while os.getppid() == parent_pid and all(_is_alive(process) for process in watched):
        time.sleep(EVERY_S)
    end()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # another user's, under strict rules: its parenthood still tells
        return True


def _end() -> None:
    with suppress(OSError, ValueError):  # the pipe may have gone with the launcher
        sys.stderr.write("\nthe launcher of this process has ended, so the run ends as well\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(EXIT_CODE)
