"""A file system in memory's place that fails as drives do: below the product's system calls, by a seed.

What the product sees lies in a real folder (in RAM); beside it stands what a power cut would leave. A file's bytes are
safe after its own sync; a name is safe after its folder's sync. Without one a power cut leaves any part of the writes,
each whole or torn at 512 bytes, and the first so many changes of names, in their order (as file systems with a log keep
it). Calls move fewer bytes than asked, are refused for a moment, fail once or for good, or find no room; a process can
be killed in any of them.

Descriptors are numbers of the simulation's own, so that a dead process' objects reach no file of another."""

from __future__ import annotations

import _pyio
import builtins
import contextlib
import errno
import fcntl
import io
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from outcore.common.quantities import KIB
from outcore.staging.lanes import homes, lane
from outcore.storage import block_spans, descriptor, posix_file
from outcore.storage.filesystem import DirectLimits
from outcore.storage.store import digests, tensor_store
from tests.simulation.threads import Killed, Simulation

FIRST_DESCRIPTOR = 1 << 30
SECTOR_BYTES = 512
REAL = SimpleNamespace(**{name: getattr(os, name) for name in dir(os) if not name.startswith("_")})
REAL_OPEN, REAL_FLOCK, REAL_FCNTL = builtins.open, fcntl.flock, fcntl.fcntl


@dataclass
class Faults:
    """What may happen, and how often in a thousand calls."""

    error: float = 0.0
    """EIO or ENOSPC, for good or for this call."""
    short: float = 0.0
    """Fewer bytes than asked, or none for the moment (EAGAIN)."""
    lost_write: float = 0.0
    """A write that the drive says it has taken and has not."""
    torn_write: float = 0.0
    """A write of which only the first sectors arrive."""
    slow_s: float = 0.0
    """Longest time of a call."""
    only: str = ""
    """Part of the path of files that are struck."""


@dataclass(eq=False)
class File:
    """A file's bytes as a power cut would find them."""

    safe: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes since the last sync: (offset, bytes), or (size, None) for a file that was cut or made longer."""


@dataclass(eq=False)
class Folder:
    """A folder's names as a power cut would find them."""

    now: dict[str, File | Folder] = field(default_factory=dict)
    safe: dict[str, File | Folder] = field(default_factory=dict)


class Process:
    """What is killed together: descriptors, and the threads that were started in it."""

    def __init__(self) -> None:
        self.descriptors: dict[int, int] = {}
        self.is_dead = False


class Drive:
    """A folder's file system. `struck` counts faults by kind."""

    def __init__(self, simulation: Simulation, root: Path, faults: Faults) -> None:
        self.simulation, self.faults = simulation, faults
        self.root = Path(os.path.realpath(root))
        self.top = Folder()
        self.log: list[tuple[Folder, dict[str, File | Folder]]] = []
        """Changes of names that no sync has brought to the drive, in order: a folder, and its names afterwards."""
        self.calls = 0
        self.kill_at: int | None = None
        """Call in which the calling process dies; with `cuts_power` all do."""
        self.cuts_power = False
        self.is_cut = False
        self.struck: list[str] = []
        self.is_full = False
        self.broken: set[str] = set()
        """Files that fail for good."""
        self.is_quiet = False
        """No faults while the world looks at what is there."""
        self.processes: list[Process] = []
        self._opened: dict[int, tuple[int, Any, str, bool, bool]] = {}
        """Number -> (real descriptor, node, path, appends, direct)."""
        self._next = FIRST_DESCRIPTOR
        self._shorts = 0
        """Calls in a row that moved too few: a drive that goes on like that is given up, and rightly."""
        self.limits = DirectLimits(True, simulation.random.choice([512, 4096]), 512, "simulated")

    # --- processes

    def process(self) -> Process:
        """A new process; the caller's task becomes its first thread."""
        made = Process()
        self.processes.append(made)
        self.simulation.current.process = made
        return made

    def end_process(self, process: Process) -> None:
        """The system closes what it left open, and with it its locks."""
        process.is_dead = True
        for number in list(process.descriptors):
            REAL.close(process.descriptors.pop(number))
            self._opened.pop(number, None)

    def cut_power(self) -> None:
        """Leave what a power cut leaves; all processes have ended."""
        for process in self.processes:
            self.end_process(process)
        self._keep_names(self.simulation.random.randint(0, len(self.log)))
        self.log.clear()
        self._materialise(self.top)
        for where, folders, files in os.walk(self.root, topdown=False):
            for name in (*files, *folders):
                (REAL.unlink if name in files else REAL.rmdir)(f"{where}/{name}")
        self._write_out(self.top, str(self.root))
        self.is_cut, self.is_full = False, False
        self.broken.clear()

    def _changed(self, folder: Folder) -> None:
        self.log.append((folder, dict(folder.now)))

    def _keep_names(self, count: int) -> None:
        """The first so many changes of names are on the drive now."""
        for folder, names in self.log[:count]:
            folder.safe = names
        del self.log[:count]

    def _materialise(self, folder: Folder) -> None:
        pick = self.simulation.random
        folder.now = dict(folder.safe)
        for node in folder.now.values():
            if isinstance(node, Folder):
                self._materialise(node)
                continue
            content = bytearray(node.safe)
            for offset, data in node.pending:
                if data is None:
                    if pick.random() < 0.5:
                        _resize(content, offset)
                    continue
                if pick.random() < 0.5:
                    continue
                if pick.random() < 0.3:
                    data = data[: pick.randint(0, len(data)) // SECTOR_BYTES * SECTOR_BYTES]
                if data:
                    _resize(content, max(len(content), offset + len(data)))
                    content[offset : offset + len(data)] = data
            node.safe, node.pending = bytes(content), []

    def _write_out(self, folder: Folder, path: str) -> None:
        for name, node in folder.now.items():
            below = f"{path}/{name}"
            if isinstance(node, Folder):
                REAL.mkdir(below)
                self._write_out(node, below)
            else:
                with REAL_OPEN(below, "wb") as file:
                    file.write(node.safe)

    # --- faults

    def enter(self, call: str, path: str, *, may_fail: bool = True, die: Callable[[], None] = lambda: None) -> None:
        """Every call comes by here: another thread's turn, time, death, errors. `die`: what a killed call has done."""
        simulation, process = self.simulation, self.simulation.current.process
        if self.is_quiet:
            return
        simulation.step()
        if process is not None and process.is_dead:
            simulation.kill(process)
        self.calls += 1
        if self.kill_at is not None and self.calls >= self.kill_at and process is not None:
            self.kill_at = None
            die()
            self.struck.append(f"killed at {call} of {os.path.basename(path)}")
            for other in self.processes if self.cuts_power else [process]:
                self.end_process(other)
            self.is_cut = self.cuts_power
            simulation.kill(process)
        if self.faults.slow_s:
            simulation.sleep(simulation.random.random() * self.faults.slow_s)
        is_broken = path in self.broken
        if may_fail and self.faults.only in path and (self.is_full or is_broken or self._strikes(self.faults.error)):
            grows = call in ("write", "open", "mkdir", "resize", "reserve") and not is_broken
            number = errno.ENOSPC if grows and (self.is_full or simulation.chance(0.5)) else errno.EIO
            if self.is_full and not grows and not is_broken:
                return
            if number == errno.EIO and simulation.chance(0.3):
                self.broken.add(path)
            self.is_full = self.is_full or (number == errno.ENOSPC and simulation.chance(0.5))
            self.struck.append(f"{errno.errorcode[number]} at {call} of {os.path.basename(path)}")
            raise OSError(number, os.strerror(number), path)

    def _strikes(self, in_thousand: float) -> bool:
        return in_thousand > 0 and not self.is_quiet and self.simulation.chance(in_thousand / 1000)

    def _some(self, n_bytes: int, *, at_least: int) -> int:
        """How many of these bytes a call moves. `at_least` 0: direct transfers, which may be refused for a moment."""
        if n_bytes > 1 and self._shorts < 3 and self._strikes(self.faults.short):
            self._shorts += 1
            if not at_least and self.simulation.chance(0.3):
                raise OSError(errno.EAGAIN, "later")
            return self.simulation.random.randrange(1, n_bytes)  # none would be the end of the file
        self._shorts = 0
        return n_bytes

    # --- names

    def holds(self, path: Any) -> bool:
        """Whether a path is on this drive."""
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(f"{self.root}{os.sep}")

    def _node(self, path: str) -> File | Folder:
        node: Any = self.top
        for part in os.path.relpath(os.path.abspath(path), self.root).split(os.sep):
            if part != ".":
                node = node.now[part]
        return node

    def _above(self, path: str) -> tuple[Folder, str]:
        path = os.path.abspath(path)
        found = self._node(os.path.dirname(path))
        assert isinstance(found, Folder)
        return found, os.path.basename(path)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        path = os.path.abspath(path)
        self.enter("open", path, may_fail=bool(flags & os.O_CREAT))
        makes, direct = bool(flags & os.O_CREAT) and not os.path.exists(path), getattr(os, "O_DIRECT", 0)
        ours = flags & ~direct & ~os.O_WRONLY | os.O_RDWR if flags & os.O_WRONLY else flags & ~direct
        real = REAL.open(path, ours, mode)  # readable, so that a sync knows what it syncs
        if path == str(self.root):
            node: File | Folder = self.top
        elif makes:
            folder, name = self._above(path)
            node = folder.now[name] = File()
            self._changed(folder)
        else:
            node = self._node(path)
        if flags & os.O_TRUNC and isinstance(node, File):
            node.pending.append((0, None))
        number, self._next = self._next, self._next + 1
        self._opened[number] = real, node, path, bool(flags & os.O_APPEND), bool(flags & direct)
        process = self.simulation.current.process
        if process is not None:
            process.descriptors[number] = real
        return number

    def close(self, number: int) -> None:
        opened = self._opened.pop(number, None)
        if opened is not None:
            for process in self.processes:
                process.descriptors.pop(number, None)
            REAL.close(opened[0])

    def rename(self, old: Any, new: Any) -> None:
        self.enter("rename", str(new))
        REAL.rename(old, new)
        above, name = self._above(os.fspath(old))
        other, target = self._above(os.fspath(new))
        assert above is other, "the simulated drive renames within a folder"
        above.now[target] = above.now.pop(name)
        self._changed(above)

    def unlink(self, path: Any) -> None:
        self.enter("unlink", str(path), may_fail=False)
        REAL.unlink(path)
        folder, name = self._above(os.fspath(path))
        del folder.now[name]
        self._changed(folder)

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        self.enter("mkdir", str(path))
        REAL.mkdir(path, mode)
        folder, name = self._above(os.fspath(path))
        folder.now[name] = Folder()
        self._changed(folder)

    def rmdir(self, path: Any) -> None:
        self.enter("rmdir", str(path), may_fail=False)
        REAL.rmdir(path)
        folder, name = self._above(os.fspath(path))
        del folder.now[name]
        self._changed(folder)

    # --- bytes

    def _file(self, number: int) -> tuple[int, Any, str, bool, bool]:
        process = self.simulation.current.process
        if process is not None and process.is_dead:
            raise Killed
        if number not in self._opened:
            raise OSError(errno.EBADF, "the descriptor is closed")
        return self._opened[number]

    def write(self, number: int, data: Any) -> int:
        real, node, path, appends, _ = self._file(number)
        data = bytes(data)
        some = memoryview(data)[: self.simulation.random.randint(0, len(data))]

        def die() -> None:  # in the middle of it
            at = REAL.fstat(real).st_size if appends else REAL.lseek(real, 0, os.SEEK_CUR)
            self._put(real, node, path, some, at, at_least=1)

        self.enter("write", path, die=die)
        at = REAL.fstat(real).st_size if appends else REAL.lseek(real, 0, os.SEEK_CUR)
        count = self._put(real, node, path, memoryview(data).cast("B"), at, at_least=1)
        REAL.lseek(real, at + count, os.SEEK_SET)
        return count

    def pwritev(self, number: int, buffers: Any, at: int) -> int:
        real, node, path, _, is_direct = self._file(number)
        (data,) = buffers
        self._check_direct(is_direct, data, at)
        self.enter("write", path)
        return self._put(real, node, path, memoryview(data).cast("B"), at, at_least=0)

    def _put(self, real: int, node: File, path: str, data: memoryview, at: int, *, at_least: int) -> int:
        count = self._some(len(data), at_least=at_least)
        given = bytes(data[:count])
        if self.faults.only in path:
            if self._strikes(self.faults.lost_write):
                self.struck.append(f"lost write of {count} at {at} of {os.path.basename(path)}")
                _resize_real(real, at + count)
                return count
            if self._strikes(self.faults.torn_write):
                given = given[: self.simulation.random.randrange(len(given) or 1) // SECTOR_BYTES * SECTOR_BYTES]
                self.struck.append(f"torn write of {count} at {at} of {os.path.basename(path)}")
                _resize_real(real, at + count)
        REAL.pwrite(real, given, at)
        node.pending.append((at, given))
        return count

    def read(self, number: int, n_bytes: int) -> bytes:
        real, _, path, _, _ = self._file(number)
        self.enter("read", path, may_fail=False)
        return REAL.read(real, self._some(n_bytes, at_least=1))

    def preadv(self, number: int, buffers: Any, at: int) -> int:
        real, _, path, _, is_direct = self._file(number)
        (data,) = buffers
        self._check_direct(is_direct, data, at)
        self.enter("read", path)
        view = memoryview(data).cast("B")
        count = self._some(len(view), at_least=0)
        found = REAL.pread(real, count, at)
        view[: len(found)] = found
        return len(found)

    def _check_direct(self, is_direct: bool, data: Any, at: int) -> None:
        import numpy as np

        block = self.limits.block_bytes
        address = np.frombuffer(data, dtype=np.uint8).ctypes.data if len(data) else 0
        if is_direct:
            assert at % block == 0 and len(data) % block == 0, "a direct transfer of parts of blocks"
            assert address % self.limits.memory_align_bytes == 0, "a direct transfer to memory that is not aligned"

    def fsync(self, number: int) -> None:
        real, node, path, _, _ = self._file(number)
        self.enter("fsync", path)
        if isinstance(node, Folder):
            self._keep_names(max((i + 1 for i, (folder, _) in enumerate(self.log) if folder is node), default=0))
        else:
            node.pending = []
            node.safe = REAL.pread(real, 1 << 30, 0) if REAL.fstat(real).st_size else b""

    def ftruncate(self, number: int, size: int) -> None:
        real, node, path, _, _ = self._file(number)
        self.enter("resize", path)
        REAL.ftruncate(real, size)
        node.pending.append((size, None))

    def posix_fallocate(self, number: int, start: int, n_bytes: int) -> None:
        real, node, path, _, _ = self._file(number)
        self.enter("reserve", path)
        _resize_real(real, start + n_bytes)
        node.pending.append((start + n_bytes, None))


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


def _resize_real(real: int, size: int) -> None:
    if REAL.fstat(real).st_size < size:
        REAL.ftruncate(real, size)


PATH_CALLS = ("open", "mkdir", "rmdir", "unlink", "remove", "rename", "replace")
NUMBER_CALLS = ("close", "write", "pwritev", "read", "preadv", "fsync", "ftruncate", "posix_fallocate")
PLAIN_CALLS = ("fstat", "lseek", "pread", "isatty", "set_inheritable")


SMALLER = (
    (digests, "BLOCK_BYTES", 4 * KIB), (tensor_store, "BLOCK_BYTES", 4 * KIB), (homes, "MIN_COPY_BYTES", 2 * KIB),
    (tensor_store, "SECTION_BYTES", 16 * KIB), (descriptor, "MAX_CALL_BYTES", 16 * KIB),
    (lane, "HOME_COPY_BYTES", 8 * KIB), (block_spans, "BOUNCE_BYTES", 8 * KIB),
)  # fmt: skip
"""Sizes of the product's beyond which a transfer is cut, so that small ones are."""


@contextlib.contextmanager
def mounted(drive: Drive) -> Iterator[Drive]:
    """System calls on the drive's paths and descriptors are the simulation's; all others are the system's."""
    patches: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        patches.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def by_path(name: str) -> Callable[..., Any]:
        real, own = getattr(REAL, name), getattr(drive, {"remove": "unlink", "replace": "rename"}.get(name, name))

        def call(path: Any, *args: Any, **more: Any) -> Any:
            return (own if drive.holds(path) or _is_root(drive, path) else real)(path, *args, **more)

        return call

    def by_number(name: str, *, plain: bool) -> Callable[..., Any]:
        real = getattr(REAL, name)

        def call(number: Any, *args: Any, **more: Any) -> Any:
            if not isinstance(number, int) or number < FIRST_DESCRIPTOR:
                return real(number, *args, **more)
            return real(drive._file(number)[0], *args) if plain else getattr(drive, name)(number, *args)

        return call

    def opened(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        is_ours = drive.holds(file) or (isinstance(file, int) and file >= FIRST_DESCRIPTOR)
        return (_pyio.open if is_ours else REAL_OPEN)(file, mode, *args, **more)

    for name in PATH_CALLS:
        put(os, name, by_path(name))
    for name in (*NUMBER_CALLS, *PLAIN_CALLS):
        put(os, name, by_number(name, plain=name in PLAIN_CALLS))
    put(builtins, "open", opened)
    put(io, "open", opened)
    put(fcntl, "flock", lambda number, how: REAL_FLOCK(_real(drive, number), how))
    put(fcntl, "fcntl", lambda number, *args: 0 if number >= FIRST_DESCRIPTOR else REAL_FCNTL(number, *args))
    put(posix_file, "direct_limits", lambda number: drive.limits)
    put(descriptor, "filesystem_of", lambda path: ("ext4", "/"))
    for name in ("start_writeback", "finish_writeback"):
        put(descriptor, name, lambda *args: True)
    put(descriptor, "drop_cached", lambda *args: None)
    for module, name, n_bytes in SMALLER:
        put(module, name, n_bytes)
    put(shutil, "_use_fd_functions", False)
    put(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 40, used=0, free=1 << 39))
    try:
        yield drive
    finally:
        for owner, name, value in reversed(patches):
            setattr(owner, name, value)
        for number in list(drive._opened):
            REAL.close(drive._opened.pop(number)[0])


def _is_root(drive: Drive, path: Any) -> bool:
    return isinstance(path, str | os.PathLike) and os.path.abspath(path) == str(drive.root)


def _real(drive: Drive, number: Any) -> int:
    number = number if isinstance(number, int) else number.fileno()
    return drive._file(number)[0] if number >= FIRST_DESCRIPTOR else number
