"""`BlockFile`: positional transfers between host memory and one file, past the page cache where the filesystem allows.

Algorithm: the file is opened with O_DIRECT, so that the drive's DMA engine writes into the caller's memory and
gigabytes of weights do not push everything else out of the page cache. Direct I/O takes whole logical blocks only;
whatever is not a whole block (odd offset, size or address) goes through a small aligned bounce buffer, by
read-modify-write at the edges under a range lock, and the aligned middle goes without a copy. Cost: one system call per
transfer, plus one block read and write per unaligned edge. os.preadv and os.pwritev release the GIL, so plain threads
keep a drive busy.

Fallback: where direct I/O is refused (at open or at the first transfer) or means nothing (tmpfs), transfers are
buffered, said once per filesystem by a `BufferedFallbackWarning`, and the pages are dropped from the cache behind them.

A file whose size is not a multiple of the block is padded on the drive while it is written and has its exact size again
after `sync()` and `close()`. Block-edge locks belong to the BlockFile object: write unaligned pieces of one file
through one BlockFile, not through two.
"""

from __future__ import annotations

import errno as errno_module
import os
import stat
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from outcore.storage.errors import StorageError
from outcore.storage.filesystem import (
    RAM_FILESYSTEMS,
    direct_limits,
    drop_cached,
    filesystem_of,
    finish_writeback,
    start_writeback,
)
from outcore.storage.host_buffer import address_of, aligned_bytes, copy_bytes, host_bytes
from outcore.storage.range_locks import RangeLocks
from outcore.units import GIB, MIB, format_gb, round_up

Mode = Literal["r", "rw", "create"]

BOUNCE_BYTES = MIB  # one piece of an unaligned transfer; larger gains nothing, the copy is the cost
MAX_CALL_BYTES = GIB  # Linux moves at most 2 GiB - 4 KiB per call
DIRTY_WINDOW_BYTES = 64 * MIB  # buffered mode: written pages kept before they are forced out and dropped
DROP_FROM_BYTES = MIB  # buffered mode: smaller reads leave their pages, they cost more to drop than to keep
MAX_STALLS = 8  # calls in a row that move nothing usable before the transfer counts as failed
MAX_BUSY_TRIES = 200  # EAGAIN: at most 2 s of waiting
BUSY_SLEEP_S = 0.01


class BufferedFallbackWarning(UserWarning):
    """Direct I/O is not possible on this filesystem; transfers go through the page cache."""


class BlockFile:
    """One file of a drive, read and written at byte offsets from and into host memory. Safe from many threads.

    `mode`: "r" reads an existing file, "rw" reads and writes an existing file, "create" makes or empties it.
    `size_bytes`: with "create" the space to reserve at once; otherwise the size that the file must have.
    `direct=False` asks for buffered transfers. Raises `StorageError` for everything the system refuses.
    """

    def __init__(
        self, path: str | os.PathLike[str], mode: Mode = "r", size_bytes: int | None = None, direct: bool = True
    ) -> None:
        if mode not in ("r", "rw", "create"):
            raise ValueError(f"mode must be 'r', 'rw' or 'create', got {mode!r}")
        if size_bytes is not None and size_bytes < 0:
            raise ValueError(f"size_bytes must not be negative, got {size_bytes}")
        if not hasattr(os, "preadv"):
            raise StorageError("open", path=path, reason=f"positional vector I/O is not available on {sys.platform}")
        self.path = Path(path)
        self.mode = mode
        self._fd = -1
        self._state = threading.Condition()
        self._in_flight = 0
        self._growing = 0
        self._closed = False
        self._ranges = RangeLocks()
        self._bounces: deque[np.ndarray] = deque()
        self._written: deque[tuple[int, int]] = deque()
        self._written_bytes = 0
        self._cache_lock = threading.Lock()
        self._open(direct)
        try:
            self._size_bytes = self._disk_bytes = os.fstat(self._fd).st_size
            if mode == "create" and size_bytes is not None:
                self.preallocate(size_bytes)
            elif size_bytes is not None and size_bytes != self._size_bytes:
                raise StorageError(
                    "open",
                    path=self.path,
                    reason=f"the file has {self._size_bytes} bytes where {size_bytes} were expected",
                )
        except BaseException:
            os.close(self._fd)
            self._closed = True
            raise

    # ------------------------------------------------------------------ opening

    def _open(self, direct: bool) -> None:
        flags = {"r": os.O_RDONLY, "rw": os.O_RDWR, "create": os.O_RDWR | os.O_CREAT | os.O_TRUNC}[self.mode]
        flags |= getattr(os, "O_CLOEXEC", 0)
        direct_flag = getattr(os, "O_DIRECT", 0) if direct else 0
        try:
            try:
                self._fd = os.open(self.path, flags | direct_flag, 0o644)
            except OSError as error:
                if not direct_flag or error.errno not in (errno_module.EINVAL, errno_module.EOPNOTSUPP):
                    raise
                self._fd = os.open(self.path, flags, 0o644)
                self._say_buffered("the filesystem refuses O_DIRECT")
                direct_flag = 0
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.close(self._fd)
                raise StorageError("open", path=self.path, reason="not a regular file")
        except StorageError:
            raise
        except OSError as error:
            raise StorageError("open", path=self.path, errno=error.errno) from error
        limits = direct_limits(self._fd)
        self.block_bytes = limits.block_bytes
        self._memory_align_bytes = limits.memory_align_bytes
        self._direct = bool(direct_flag)
        if self._direct:
            if limits.supported is False:
                self._fall_back("the kernel reports no direct I/O for this file")
            elif filesystem_of(self.path)[0] in RAM_FILESYSTEMS:
                self._fall_back("the filesystem lives in memory")
        elif direct and not hasattr(os, "O_DIRECT"):
            self._say_buffered(f"{sys.platform} has no O_DIRECT")

    def _fall_back(self, reason: str) -> None:
        """Clear O_DIRECT on the open descriptor: transfers in flight on other threads just go on."""
        import fcntl

        with self._state:
            if not self._direct:
                return
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False
        self._say_buffered(reason)

    def _say_buffered(self, reason: str) -> None:
        kind, mount_point = filesystem_of(self.path)
        # The text names the filesystem, not the file: Python's default filter then shows it once per filesystem.
        warnings.warn(
            f"{mount_point} ({kind}): transfers go through the page cache because {reason}; "
            "expect lower rates than with direct I/O (a local ext4 or xfs drive has it)",
            BufferedFallbackWarning,
            stacklevel=1,
        )

    # ------------------------------------------------------------------ facts

    @property
    def size_bytes(self) -> int:
        """The file's logical size; the drive may hold padding up to the next block until `sync()` or `close()`."""
        return self._size_bytes

    @property
    def direct(self) -> bool:
        """Whether transfers really bypass the page cache."""
        return self._direct

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def writable(self) -> bool:
        return self.mode != "r"

    def __repr__(self) -> str:
        how = "closed" if self._closed else "direct" if self._direct else "buffered"
        return f"BlockFile({str(self.path)!r}, {self.mode!r}, {format_gb(self._size_bytes)}, {how})"

    # ------------------------------------------------------------------ reading

    def read_into(self, buffer: Any, offset: int) -> None:
        """Fill `buffer` from byte `offset`; blocks until every byte is there.

        `buffer`: contiguous CPU tensor or writable buffer. Fastest when address, offset and size are multiples of
        `block_bytes`. Raises StorageError (short file, I/O error, closed file); the buffer's content is then undefined.
        """
        view = host_bytes(buffer, writable=True)
        _check_offset(offset)
        if not view.nbytes:
            return
        with self._busy("read"):
            if offset + view.nbytes > self._size_bytes:
                self._refresh_size()
                if offset + view.nbytes > self._size_bytes:
                    raise StorageError(
                        "read",
                        path=self.path,
                        offset=offset,
                        wanted=view.nbytes,
                        got=max(0, self._size_bytes - offset),
                        reason=f"the file ends at {self._size_bytes} bytes",
                    )
            for part, at, aligned in self._parts(view, offset):
                got = self._read_span(part, at, part.nbytes) if aligned else self._read_bounced(part, at)
                if got < part.nbytes:
                    raise StorageError(
                        "read",
                        path=self.path,
                        offset=offset,
                        wanted=view.nbytes,
                        got=at - offset + got,
                        reason="the file ended early: it was truncated while in use",
                    )
            if not self._direct and view.nbytes >= DROP_FROM_BYTES:
                drop_cached(self._fd, offset, view.nbytes)

    def _read_bounced(self, part: np.ndarray, at: int) -> int:
        done = 0
        with self._bounce() as bounce:
            while done < part.nbytes:
                start = at + done
                skip = start % self.block_bytes
                take = min(part.nbytes - done, bounce.nbytes - skip)
                span = bounce[: round_up(skip + take, self.block_bytes)]
                got = min(self._read_span(span, start - skip, skip + take) - skip, take)
                if got > 0:
                    copy_bytes(part[done : done + got], span[skip : skip + got])
                    done += got
                if got < take:
                    break
        return done

    def _read_span(self, span: np.ndarray, at: int, needed: int) -> int:
        """Read at least `needed` bytes of `span` (a whole-block span in direct mode); fewer only at the file's end."""
        done = furthest = stalls = busy = 0
        while done < needed:
            try:
                moved = os.preadv(self._fd, [span[done : done + MAX_CALL_BYTES].data], at + done)
            except OSError as error:
                busy = self._after_error(error, "read", at + done, span.nbytes - done, busy)
                continue
            furthest = max(furthest, done + moved)
            before = done
            done = furthest if furthest >= needed or not self._direct else furthest - furthest % self.block_bytes
            stalls = 0 if done > before else stalls + 1
            if moved == 0 or stalls >= MAX_STALLS:
                break
        return furthest

    # ------------------------------------------------------------------ writing

    def write_from(self, buffer: Any, offset: int) -> None:
        """Write all of `buffer` at byte `offset`; blocks until the drive or (buffered) the page cache has it.

        A write beyond the end makes the file larger. Durable only after `sync()`. Raises StorageError.
        """
        view = host_bytes(buffer, writable=False)
        _check_offset(offset)
        if not self.writable:
            raise StorageError("write", path=self.path, offset=offset, wanted=view.nbytes, reason="opened read-only")
        if not view.nbytes:
            return
        end = offset + view.nbytes
        with self._busy("write"), self._grown_to(end, offset, view.nbytes):
            for part, at, aligned in self._parts(view, offset):
                if aligned:
                    with self._ranges.hold(at, at + part.nbytes, exclusive=False):
                        self._write_span(part, at)
                else:
                    self._write_bounced(part, at)
            if not self._direct:
                self._drop_behind(offset, view.nbytes)

    def _write_bounced(self, part: np.ndarray, at: int) -> None:
        done = 0
        block = self.block_bytes
        with self._bounce() as bounce:
            while done < part.nbytes:
                start = at + done
                skip = start % block
                # An edge block alone, so that the exclusive hold and the read stay small; whole blocks many at a time.
                if skip or part.nbytes - done < block:
                    take = min(part.nbytes - done, block - skip)
                else:
                    take = min(part.nbytes - done, bounce.nbytes)
                    take -= take % block
                span = bounce[: round_up(skip + take, block)]
                partial = take < span.nbytes
                with self._ranges.hold(start - skip, start - skip + span.nbytes, exclusive=partial):
                    if partial:
                        got = self._read_span(span, start - skip, span.nbytes)
                        span[got:] = 0
                    copy_bytes(span[skip : skip + take], part[done : done + take])
                    self._write_span(span, start - skip)
                done += take

    def _write_span(self, span: np.ndarray, at: int) -> None:
        done = stalls = busy = 0
        while done < span.nbytes:
            try:
                moved = os.pwritev(self._fd, [span[done : done + MAX_CALL_BYTES].data], at + done)
            except OSError as error:
                busy = self._after_error(error, "write", at + done, span.nbytes - done, busy)
                continue
            before = done
            done += moved
            if self._direct and done < span.nbytes:
                done -= done % self.block_bytes  # write the broken block again rather than continue unaligned
            stalls = 0 if done > before else stalls + 1
            if stalls >= MAX_STALLS:
                raise StorageError(
                    "write",
                    path=self.path,
                    offset=at,
                    wanted=span.nbytes,
                    got=done,
                    reason="the system took no more bytes and gave no reason",
                )

    def _drop_behind(self, offset: int, n_bytes: int) -> None:
        """Buffered mode: start writing the new pages, and drop those of a window ago, so that the cache stays small."""
        try:
            if not start_writeback(self._fd, offset, n_bytes):
                return
            with self._cache_lock:
                self._written.append((offset, n_bytes))
                self._written_bytes += n_bytes
                old = []
                while self._written_bytes > DIRTY_WINDOW_BYTES and len(self._written) > 1:
                    old.append(self._written.popleft())
                    self._written_bytes -= old[-1][1]
            for old_offset, old_bytes in old:
                finish_writeback(self._fd, old_offset, old_bytes)
                drop_cached(self._fd, old_offset, old_bytes)
        except OSError as error:
            if error.errno in (errno_module.ESPIPE, errno_module.EINVAL, errno_module.ENOSYS):
                return  # a filesystem without page cache control: the data itself is written
            raise StorageError("write", path=self.path, offset=offset, wanted=n_bytes, errno=error.errno) from error

    # ------------------------------------------------------------------ size and durability

    def preallocate(self, size_bytes: int) -> None:
        """Make the file at least `size_bytes` long with its blocks reserved, so that a full drive is found now.

        Where the filesystem cannot reserve (some network shares), zeros are written instead, which takes as long as
        writing. Raises StorageError (ENOSPC, EFBIG, EDQUOT, ...) and then leaves the file at its former size.
        """
        if size_bytes <= self._size_bytes:
            return
        with self._busy("preallocate"), self._state:
            before = self._size_bytes
            try:
                self._reserve(before, round_up(size_bytes, self.block_bytes) if self._direct else size_bytes)
                os.ftruncate(self._fd, size_bytes)
            except OSError as error:
                os.ftruncate(self._fd, before)
                self._disk_bytes = before
                raise StorageError(
                    "preallocate", path=self.path, offset=before, wanted=size_bytes - before, got=0, errno=error.errno
                ) from error
            self._size_bytes = self._disk_bytes = size_bytes

    def _reserve(self, start: int, end: int) -> None:
        # Not on the direct descriptor: where the C library emulates the call it writes single bytes.
        fd = os.open(self.path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            if hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(fd, start, end - start)
                    return
                except OSError as error:
                    if error.errno not in (errno_module.EOPNOTSUPP, errno_module.EINVAL, errno_module.ENOSYS):
                        raise
            zeros = bytes(MIB)
            at = start
            while at < end:
                at += os.pwrite(fd, zeros[: end - at], at)
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Make everything written so far survive a power cut (fsync) and give the file its exact size.

        Raises StorageError, also when the file was made shorter behind our back.
        """
        with self._busy("sync"):
            try:
                if self.writable:
                    self._trim()
                os.fsync(self._fd)
                found = os.fstat(self._fd).st_size
            except OSError as error:
                raise StorageError("sync", path=self.path, errno=error.errno) from error
            if found < self._size_bytes:
                raise StorageError(
                    "sync",
                    path=self.path,
                    wanted=self._size_bytes,
                    got=found,
                    reason="the file was truncated while in use",
                )

    def close(self) -> None:
        """Wait for transfers under way, restore the exact size, close. Later transfers raise. Twice is harmless."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            while self._in_flight:
                self._state.wait()
            try:
                if self.writable:
                    self._trim()
            except OSError as error:
                raise StorageError("close", path=self.path, errno=error.errno) from error
            finally:
                os.close(self._fd)
                self._bounces.clear()

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    # ------------------------------------------------------------------ helpers

    @contextmanager
    def _busy(self, action: str) -> Iterator[None]:
        """Keep the descriptor open while a transfer uses its number: a reused number would hit another file."""
        with self._state:
            if self._closed:
                raise StorageError(action, path=self.path, errno=errno_module.EBADF, reason="the file is closed")
            self._in_flight += 1
        try:
            yield
        finally:
            with self._state:
                self._in_flight -= 1
                if self._closed and not self._in_flight:
                    self._state.notify_all()

    @contextmanager
    def _grown_to(self, end: int, offset: int, n_bytes: int) -> Iterator[None]:
        """Give the file room for a write up to `end`, and count the new size once the bytes are there."""
        if end <= self._size_bytes and (not self._direct or round_up(end, self.block_bytes) <= self._disk_bytes):
            yield
            return
        with self._state:
            need = round_up(end, self.block_bytes) if self._direct else end
            if need > self._disk_bytes:
                try:
                    if need > os.fstat(self._fd).st_size:
                        os.ftruncate(self._fd, need)
                except OSError as error:
                    raise StorageError(
                        "write", path=self.path, offset=offset, wanted=n_bytes, got=0, errno=error.errno
                    ) from error
                self._disk_bytes = need
            self._growing += 1
        try:
            yield
            with self._state:
                self._size_bytes = max(self._size_bytes, end)
        finally:
            with self._state:
                self._growing -= 1

    def _trim(self) -> None:
        with self._state:
            if self._growing == 0 and self._disk_bytes > self._size_bytes:
                if os.fstat(self._fd).st_size > self._size_bytes:
                    os.ftruncate(self._fd, self._size_bytes)
                self._disk_bytes = self._size_bytes

    def _refresh_size(self) -> None:
        """Another process may have made the file longer since it was opened."""
        with self._state:
            found = os.fstat(self._fd).st_size
            if self._disk_bytes == self._size_bytes and not self._growing and found > self._size_bytes:
                self._size_bytes = self._disk_bytes = found

    def _parts(self, view: np.ndarray, offset: int) -> Iterator[tuple[np.ndarray, int, bool]]:
        """Split into (bytes, file offset, whether it may go without a bounce)."""
        end = offset + view.nbytes
        if not self._direct:
            yield view, offset, True
            return
        block = self.block_bytes
        first, last = round_up(offset, block), end - end % block
        if first >= last or (address_of(view) + first - offset) % self._memory_align_bytes:
            yield view, offset, False
            return
        if first > offset:
            yield view[: first - offset], offset, False
        yield view[first - offset : last - offset], first, True
        if end > last:
            yield view[last - offset :], last, False

    @contextmanager
    def _bounce(self) -> Iterator[np.ndarray]:
        try:
            bounce = self._bounces.pop()
        except IndexError:
            bounce = aligned_bytes(max(BOUNCE_BYTES, self.block_bytes))
        try:
            yield bounce
        finally:
            self._bounces.append(bounce)

    def _after_error(self, error: OSError, action: str, at: int, wanted: int, busy: int) -> int:
        """Decide whether a failed call is worth repeating; raises StorageError where not."""
        if error.errno == errno_module.EAGAIN and busy < MAX_BUSY_TRIES:
            time.sleep(BUSY_SLEEP_S)
            return busy + 1
        if error.errno == errno_module.EINVAL and self._direct:
            self._fall_back("the filesystem accepts O_DIRECT at open but refuses direct transfers")
            return busy
        raise StorageError(action, path=self.path, offset=at, wanted=wanted, got=0, errno=error.errno) from error


def _check_offset(offset: int) -> None:
    if not isinstance(offset, int) or offset < 0:
        raise ValueError(f"offset must be a non-negative integer, got {offset!r}")
