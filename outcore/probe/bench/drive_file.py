"""The file the drive is measured with: reserved, filled with random bytes, locked, and always removed.

Random bytes in written extents, because a drive (or its host) answers zeros and never-written extents without touching
its flash. Removal: when the context ends, for whatever reason. Ctrl-C can come where no `try` is around a file yet, or
any more (between its creation and the `with` that gets it): names carry the run's mark, and `remove_own_files` removes
what is left of it. After kill -9 or a power cut the file stays, unlocked; `sweep` at the next start recognises it by
its name and its free lock, and removes it.

Reads from the drive straight into GPU memory through kvikio: 'gds' where it was proved direct, else 'kvikio'.

Measured beside the staged lanes, so that the faster path is chosen by figures and not by its name."""

from __future__ import annotations

import errno
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outcore.common.classes import Closing
from outcore.common.os_layer import lock_file
from outcore.common.quantities import GIB, MIB, format_gb
from outcore.probe.bench.measurement import Measurement, timed
from outcore.probe.gds.facts import GdsFacts
from outcore.probe.gds.verdict import PathVerdict
from outcore.storage import BlockFile, PosixEngine, StorageEngine, StorageError, Transfer, aligned_bytes, open_engine

PREFIX = ".outcore-probe-"
SUFFIX = ".bin"
LEAST_BYTES = 32 * MIB
FILL_CHUNK_BYTES = 64 * MIB
FREE_MARGIN_BYTES = GIB
"""Never fill a drive closer than this: other programs live on it too."""
RUN = f"{os.getpid()}-{secrets.token_hex(6)}"
"""Text in the name of every file of this process, and of no other's."""


class TestPathError(ValueError):
    """The directory cannot be measured; the message says why and what to do."""

    __test__ = False  # not a test class, whatever pytest thinks of its name


def check_directory(directory: Path) -> None:
    """Raises `TestPathError` unless `directory` exists, is a directory, and a file can be created in it."""
    if not directory.exists():
        raise TestPathError(f"{directory} does not exist: create it (mkdir -p {directory}) or name another with --path")
    if not directory.is_dir():
        raise TestPathError(f"{directory} is not a directory: --path wants the directory whose drive is to be measured")
    probe = directory / f"{PREFIX}{RUN}-{secrets.token_hex(4)}.touch"
    try:
        probe.touch(exist_ok=False)
        probe.unlink(missing_ok=True)
    except OSError as error:
        why = "is on a read-only filesystem" if error.errno == errno.EROFS else f"is not writable ({error.strerror})"
        raise TestPathError(f"{directory} {why}: choose a directory you may write to with --path") from error
    except BaseException:  # Ctrl-C between the two
        probe.unlink(missing_ok=True)
        raise


def remove_own_files(directories: Iterable[Path]) -> list[Path]:
    """Removes every file of this process that is still in `directories`; returns those that the system does not let go.

    For the end of a run, Ctrl-C's too. Twice is harmless."""
    left = []
    for directory in directories:
        for path in sorted(directory.glob(f"{PREFIX}{RUN}*")):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                left.append(path)
    return left


def sweep(directory: Path) -> list[Path]:
    """Removes test files that a killed run left behind (nobody holds their lock); returns what was removed."""
    removed = []
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue
        try:
            if _lock(fd):
                path.unlink(missing_ok=True)
                removed.append(path)
        except OSError:
            continue
        finally:
            os.close(fd)
    return removed


class TestFile(Closing):
    """A filled file in `directory`; a context manager that removes it.

    `wanted_bytes` is cut to what fits with a margin. `fill` writes it and may stop early on a slow drive; `size_bytes`
    is what may be read. Raises `TestPathError` when fewer than 32 MiB fit."""

    __test__ = False

    def __init__(self, directory: Path, wanted_bytes: int) -> None:
        check_directory(directory)
        self.swept = sweep(directory)
        free_bytes = _free_bytes(directory)
        size_bytes = min(wanted_bytes, max(0, free_bytes - FREE_MARGIN_BYTES)) // MIB * MIB
        if size_bytes < min(LEAST_BYTES, wanted_bytes):
            raise TestPathError(
                f"no space for the test file on {directory}: {format_gb(free_bytes)} free, "
                f"{format_gb(LEAST_BYTES + FREE_MARGIN_BYTES)} needed; free some or name another drive with --path"
            )
        self.directory = directory
        self.size_bytes = size_bytes
        self.path = directory / f"{PREFIX}{RUN}-{secrets.token_hex(4)}{SUFFIX}"
        self.fill_gb_per_s = 0.0
        self.written_bytes = 0
        self._lock_fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _lock(self._lock_fd)
            with BlockFile(self.path, "rw") as file:
                file.preallocate(size_bytes)
        except StorageError as error:
            self.close()
            raise TestPathError(f"the test file cannot be made in {directory}: {error}") from error
        except BaseException:
            self.close()
            raise

    def fill(self, limit_s: float) -> float:
        """Writes random bytes until the file is full or the time is up; cuts the file there. Returns GB/s."""
        chunk_bytes = min(FILL_CHUNK_BYTES, self.size_bytes)
        source = aligned_bytes(chunk_bytes)
        source[:] = np.random.default_rng().integers(0, 256, chunk_bytes, dtype=np.uint8)
        start_s, at = time.perf_counter(), 0
        with PosixEngine(num_threads=4, block_bytes=8 * MIB) as engine, BlockFile(self.path, "rw") as file:
            while at < self.size_bytes:
                n_bytes = min(chunk_bytes, self.size_bytes - at)
                np.add(source, 1, out=source)  # no two chunks alike: some drives recognise duplicates
                self.written_bytes += engine.submit_write(file, at, source[:n_bytes]).wait()
                at += n_bytes
                if time.perf_counter() - start_s > limit_s and at >= min(LEAST_BYTES, self.size_bytes):
                    break
            file.sync()
        elapsed_s = time.perf_counter() - start_s
        if at < self.size_bytes:
            os.ftruncate(self._lock_fd, at)
            self.size_bytes = at
        self.fill_gb_per_s = at / elapsed_s / 1e9
        return self.fill_gb_per_s

    def close(self) -> None:
        """Removes the file. Twice is harmless."""
        if self._lock_fd < 0:
            return
        fd, self._lock_fd = self._lock_fd, -1
        if sys.platform == "win32":
            os.close(fd)
            self.path.unlink(missing_ok=True)
        else:
            self.path.unlink(missing_ok=True)
            os.close(fd)


def _free_bytes(directory: Path) -> int:
    import shutil

    return shutil.disk_usage(directory).free


def _lock(fd: int) -> bool:
    """Takes an exclusive lock without waiting; it dies with the process. True when it was free."""
    try:
        lock_file(fd)
    except BlockingIOError:
        return False
    return True


BATCH_BYTES = 64 * MIB
# Measured: kvikio into GPU memory reaches the drive's rate with 16 threads of 8 MiB, 40 % of it with its defaults.
DIRECT_THREADS = 16
DIRECT_TASK_BYTES = 8 * MIB


def open_direct_engine(verdict: PathVerdict, facts: GdsFacts) -> tuple[str, StorageEngine | None, str]:
    """(name, engine, reason): an engine that reads into device memory, or None and why there is none."""
    name = "gds" if verdict.is_direct else "kvikio"
    if not facts.kvikio_version:
        return name, None, "kvikio is not installed"
    if facts.auto.status != "ok" and not verdict.is_direct:
        return name, None, f"kvikio's read failed: {facts.auto.detail or facts.auto.status}"
    try:
        engine = open_engine("kvikio", num_threads=DIRECT_THREADS, task_bytes=DIRECT_TASK_BYTES, gds=verdict.is_direct)
    except (RuntimeError, OSError) as error:
        return name, None, str(error)
    return name, engine, ""


def measure_direct(engine: Any, name: str, file: BlockFile, device: torch.device, limit_s: float) -> Measurement:
    """The rate of `engine` into memory of `device`, two batches always under way."""
    batch_bytes = min(BATCH_BYTES, file.size_bytes // 2 // MIB * MIB)
    buffers = [torch.empty(batch_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    under_way: deque[tuple[Transfer, torch.Tensor]] = deque()
    offset = 0

    def send(buffer: torch.Tensor) -> None:
        nonlocal offset
        under_way.append((engine.submit_read(file, offset, buffer), buffer))
        offset = offset + batch_bytes if offset + 2 * batch_bytes <= file.size_bytes else 0

    def step() -> int:
        transfer, buffer = under_way.popleft()
        moved_bytes = transfer.wait()
        send(buffer)
        return moved_bytes

    start_s = time.perf_counter()
    for buffer in buffers:
        send(buffer)
    moved_bytes, _ = timed(step, limit_s)
    moved_bytes += sum(transfer.wait() for transfer, _ in under_way)
    elapsed_s = time.perf_counter() - start_s
    target = f"{file.path.parent} -> {device}"
    return Measurement("drive_to_gpu", target, name, DIRECT_TASK_BYTES, DIRECT_THREADS, moved_bytes, elapsed_s)
