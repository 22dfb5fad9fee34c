"""Power cuts: a loop-mounted ext4 that can be shut down at any moment, as the kernel's own tests do it.

EXT4_IOC_SHUTDOWN without a flush of the log drops everything that was not brought to the drive by a sync, file data and
names alike, and every call after it fails with EIO. A new mount of the same image then shows what a machine would find
after its power was cut. Needs root and loop devices; `available` says why not.
"""

import contextlib
import fcntl
import os
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
BUSY_S = 10.0
"""A process that another test began at this moment holds files open until it is another program."""


def why_not() -> str | None:
    """None where power can be cut, else the reason."""
    if os.name != "posix" or os.geteuid() != 0:
        return "cutting the power of a file system needs root"
    if not Path("/dev/loop-control").exists():
        return "cutting the power of a file system needs loop devices (/dev/loop-control)"
    return None


class Drive:
    """An ext4 in a file. `root`: where it is mounted."""

    def __init__(self, folder: Path, size_mb: int = 512) -> None:
        self.root = folder / "drive"
        self._image = folder / "drive.img"
        self.root.mkdir(parents=True)
        with open(self._image, "wb") as file:
            file.truncate(size_mb << 20)
        # No lazy initialisation: a kernel thread would write beside the test.
        options = ["-q", "-E", "lazy_itable_init=0,lazy_journal_init=0"]
        subprocess.run(["mkfs.ext4", *options, str(self._image)], check=True, capture_output=True)
        self.mount()

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop,commit=300", str(self._image), str(self.root)], check=True)

    def unmount(self) -> None:
        # Lazily: a process that was killed may hold a file open for a moment.
        subprocess.run(["umount", "-l", str(self.root)], check=True)

    def cut(self) -> None:
        """Cut the power: what was not synced is lost, whatever comes after fails."""
        handle = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(handle)

    def power_up(self) -> None:
        """Mount it again after a cut; the journal is replayed as after a real one."""
        deadline_s = time.monotonic() + BUSY_S
        while (done := subprocess.run(["umount", str(self.root)], capture_output=True, text=True)).returncode:
            assert time.monotonic() < deadline_s, done.stderr
            time.sleep(0.05)
        self.mount()


@contextlib.contextmanager
def drive(folder: Path, size_mb: int = 512) -> Iterator[Drive]:
    made = Drive(folder, size_mb)
    try:
        yield made
    finally:
        made.unmount()


class PowerIsCut(BaseException):
    """Raised in the code under test right after the cut: nothing that it does afterwards reaches the drive."""


@contextlib.contextmanager
def counted_calls(on_call) -> Iterator[None]:
    """Have `on_call()` called before each system call that publishes something: fsync, rename, replace, unlink, rmdir,
    mkdir, open for writing. Python's own functions only, which is what the checkpoint's code uses. Threads that other
    tests left behind are not cut off."""
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    names = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")
    real = {name: getattr(os, name) for name in names}

    def wrapped(name: str):
        def call(*args, **kwargs):
            if threading.get_ident() not in others:
                on_call()
            return real[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(os, name, wrapped(name))
        yield
    finally:
        for name in names:
            setattr(os, name, real[name])
