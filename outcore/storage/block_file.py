"""`BlockFile`: positional transfers between host memory and one file, past the page cache where the filesystem allows.

Algorithm: the file is opened direct (O_DIRECT; unbuffered on Windows), so that the drive's DMA engine writes into the
caller's memory and gigabytes of weights do not push everything else out of the page cache. `BlockSpans` fits any
offset, size and address to the whole blocks that direct I/O takes. Cost: one system call per transfer, plus one block
read and write per unaligned edge. The system calls release the GIL, so plain threads keep a drive busy.

Fallback: where direct I/O is refused (at open or at the first transfer) or means nothing (tmpfs), transfers are
buffered, said once per filesystem by a `BufferedFallbackWarning`, and the pages are dropped from the cache behind them.

A file whose size is not a multiple of the block is padded on the drive while it is written and has its exact size again
after `sync()` and `close()`. Block-edge locks belong to the BlockFile object: write unaligned pieces of one file
through one BlockFile, not through two."""

from __future__ import annotations

import errno as errno_module
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outcore.common.classes import Closing
from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import format_gb, format_s, round_up
from outcore.storage.block_spans import BlockSpans, host_bytes
from outcore.storage.descriptor import Descriptor, WriteBehind
from outcore.storage.errors import StorageError
from outcore.storage.posix_file import Mode


class BlockFile(Closing):
    """One file of a drive, read and written at byte offsets from and into host memory. Safe from many threads.

    `mode`: "r" reads an existing file, "rw" reads and writes an existing file, "create" makes or empties it.
    `size_bytes`: with "create" the space to reserve at once; otherwise the size that the file must have.
    `direct=False` asks for buffered transfers. Raises `StorageError` for everything the system refuses."""

    def __init__(
        self, path: str | os.PathLike[str], mode: Mode = "r", size_bytes: int | None = None, direct: bool = True
    ) -> None:
        self._closed = True
        if mode not in ("r", "rw", "create"):
            raise ValueError(f"mode must be 'r', 'rw' or 'create', got {mode!r}")
        if size_bytes is not None and size_bytes < 0:
            raise ValueError(f"size_bytes must not be negative, got {size_bytes}")
        self.path = Path(path)
        self.mode = mode
        self.writable = mode != "r"
        self._state = threading.Condition()
        self._in_use = 0
        self._growing = 0
        self._cache = WriteBehind()
        self._close_callbacks: list[Callable[[], object]] = []
        self._descriptor = Descriptor(self.path, mode, direct=direct)
        self._spans = BlockSpans(self._descriptor)
        self._closed = False
        self._size_bytes = self._disk_bytes = self._descriptor.file.size_bytes()
        try:
            if mode == "create" and size_bytes is not None:
                self.preallocate(size_bytes)
            elif size_bytes is not None and size_bytes != self._size_bytes:
                found = f"the file has {self._size_bytes} bytes where {size_bytes} were expected"
                raise StorageError("open", path=self.path, reason=found)
        except BaseException:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        """The file's logical size; the drive may hold padding up to the next block until `sync()` or `close()`."""
        return self._size_bytes

    @property
    def block_bytes(self) -> int:
        """Transfers whose offset and size are multiples of it (512 or 4096) are the fastest."""
        return self._descriptor.block_bytes

    @property
    def direct(self) -> bool:
        """True when transfers really bypass the page cache."""
        return self._descriptor.direct

    @property
    def closed(self) -> bool:
        return self._closed

    def __repr__(self) -> str:
        how = "closed" if self._closed else "direct" if self.direct else "buffered"
        return f"BlockFile({str(self.path)!r}, {self.mode!r}, {format_gb(self._size_bytes)}, {how})"

    # ------------------------------------------------------------------ reading

    def read_into(self, buffer: Any, offset: int) -> None:
        """Fill `buffer` from byte `offset`; blocks until every byte is there.

        `buffer`: contiguous CPU tensor or writable buffer. Fastest when address, offset and size are multiples of
        `block_bytes`. Raises StorageError (short file, I/O error, closed file); the buffer's content is then undefined.
        """
        view = host_bytes(buffer, writable=True)
        check_offset(offset)
        if not view.nbytes:
            return
        self.enter("read")
        try:
            self._check_end(offset, view.nbytes)
            got = self._spans.read(view, offset)
            if got < view.nbytes:
                reason = "the file ended early: it was truncated while in use"
                raise StorageError("read", path=self.path, offset=offset, wanted=view.nbytes, got=got, reason=reason)
            if not self.direct:
                self._cache.after_read(self._descriptor.file.fd, offset, view.nbytes)
        finally:
            self.leave()

    def _check_end(self, offset: int, n_bytes: int) -> None:
        if offset + n_bytes <= self._size_bytes:
            return
        with self._state:  # another process may have made the file longer since it was opened
            found = self._descriptor.file.size_bytes()
            if self._disk_bytes == self._size_bytes and not self._growing and found > self._size_bytes:
                self._size_bytes = self._disk_bytes = found
        if offset + n_bytes > self._size_bytes:
            raise StorageError(
                "read",
                path=self.path,
                offset=offset,
                wanted=n_bytes,
                got=max(0, self._size_bytes - offset),
                reason=f"the file ends at {self._size_bytes} bytes",
            )

    # ------------------------------------------------------------------ writing

    def write_from(self, buffer: Any, offset: int) -> None:
        """Write all of `buffer` at byte `offset`; blocks until the drive or (buffered) the page cache has it.

        A write beyond the end makes the file larger. Durable only after `sync()`. Raises StorageError."""
        view = host_bytes(buffer, writable=False)
        check_offset(offset)
        if not self.writable:
            raise StorageError("write", path=self.path, offset=offset, wanted=view.nbytes, reason="opened read-only")
        if not view.nbytes:
            return
        end = offset + view.nbytes
        self.enter("write")
        grows = False
        try:
            grows = self._make_room(end, offset, view.nbytes)
            self._spans.write(view, offset)
            if not self.direct:
                self._drop_behind(offset, view.nbytes)
            if grows:
                with self._state:
                    self._size_bytes = max(self._size_bytes, end)
        finally:
            if grows:
                with self._state:
                    self._growing -= 1
            self.leave()

    def _make_room(self, end: int, offset: int, n_bytes: int) -> bool:
        """Make the file long enough for a write up to `end`; True when the write touches the padding behind the end,
        which must then not be trimmed meanwhile."""
        need = round_up(end, self.block_bytes) if self.direct else end
        if need <= self._size_bytes:
            return False
        with self._state:
            if need > self._disk_bytes:
                try:
                    if need > self._descriptor.file.size_bytes():
                        self._descriptor.file.resize(need)
                except OSError as error:
                    raise StorageError(
                        "write", path=self.path, offset=offset, wanted=n_bytes, got=0, errno=error.errno
                    ) from error
                self._disk_bytes = need
            self._growing += 1
        return True

    def _drop_behind(self, offset: int, n_bytes: int) -> None:
        try:
            self._cache.after_write(self._descriptor.file.fd, offset, n_bytes)
        except OSError as error:
            raise StorageError("write", path=self.path, offset=offset, wanted=n_bytes, errno=error.errno) from error

    # ------------------------------------------------------------------ size and durability

    def preallocate(self, size_bytes: int) -> None:
        """Make the file at least `size_bytes` long with its blocks reserved, so that a full drive is found now.

        Where the filesystem cannot reserve (some network shares), zeros are written instead, which takes as long as
        writing. Raises StorageError (ENOSPC, EFBIG, EDQUOT, ...) and then leaves the file at its former size."""
        if not self.writable:
            raise StorageError("preallocate", path=self.path, wanted=size_bytes, reason="opened read-only")
        self.enter("preallocate")
        try:
            with self._state:
                before = self._size_bytes
                if size_bytes <= before:
                    return
                try:
                    self._descriptor.file.reserve(before, size_bytes)
                except OSError as error:
                    if not self._growing:
                        self._descriptor.file.resize(before)
                        self._disk_bytes = before
                    free_bytes = shutil.disk_usage(self.path).free
                    raise StorageError(
                        "preallocate",
                        path=self.path,
                        offset=before,
                        wanted=size_bytes - before,
                        got=0,
                        errno=error.errno,
                        reason=f"{format_gb(size_bytes - before)} needed, {format_gb(free_bytes)} free there",
                    ) from error
                self._size_bytes = size_bytes
                self._disk_bytes = max(self._disk_bytes, size_bytes)
        finally:
            self.leave()

    def sync(self) -> None:
        """Make everything written so far survive a power cut (fsync) and give the file its exact size.

        Raises StorageError, also when the file was made shorter behind our back."""
        self.enter("sync")
        try:
            self._trim()
            self._descriptor.file.sync()
            found = self._descriptor.file.size_bytes()
        except OSError as error:
            raise StorageError("sync", path=self.path, errno=error.errno) from error
        finally:
            self.leave()
        if found < self._size_bytes:
            reason = "the file was truncated while in use"
            raise StorageError("sync", path=self.path, wanted=self._size_bytes, got=found, reason=reason)

    def _trim(self) -> None:
        with self._state:
            if self.writable and self._growing == 0 and self._disk_bytes > self._size_bytes:
                if self._descriptor.file.size_bytes() > self._size_bytes:
                    self._descriptor.file.resize(self._size_bytes)
                self._disk_bytes = self._size_bytes

    # ------------------------------------------------------------------ lifetime

    def enter(self, action: str) -> None:
        """Keep the file open until `leave` (called by engines). A number closed under a transfer could be reused by
        another file, which the transfer would then hit. Raises StorageError when the file is closed."""
        with self._state:
            if self._closed:
                raise StorageError(action, path=self.path, errno=errno_module.EBADF, reason="the file is closed")
            self._in_use += 1

    def leave(self) -> None:
        with self._state:
            self._in_use -= 1
            if self._closed and not self._in_use:
                self._state.notify_all()

    def add_close_callback(self, fn: Callable[[], object]) -> None:
        """Run `fn()` in `close()`, after the last transfer: for engines with handles of their own to the file."""
        with self._state:
            self._close_callbacks.append(fn)

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait for transfers under way, restore the exact size, close. Later transfers raise. Twice is harmless.

        TimeoutError when a transfer does not end: the file then stays open until the process ends."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            if not self._state.wait_for(lambda: not self._in_use, timeout_s):
                raise TimeoutError(
                    f"close of {self.path}: {self._in_use} transfers did not end within {format_s(timeout_s)}: the "
                    "drive hangs"
                )
            callbacks, self._close_callbacks = self._close_callbacks, []
            try:
                for fn in callbacks:
                    fn()
                self._trim()
            except OSError as error:
                raise StorageError("close", path=self.path, errno=error.errno) from error
            finally:
                self._descriptor.file.close()

    def __del__(self) -> None:
        if not self._closed:
            self.close()


def check_offset(offset: int) -> None:
    if not isinstance(offset, int) or offset < 0:
        raise ValueError(f"offset must be a non-negative integer, got {offset!r}")
