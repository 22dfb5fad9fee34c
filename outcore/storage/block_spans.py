"""`BlockSpans`: any run of bytes fitted to the whole blocks that direct I/O takes.

A transfer is cut into at most three parts: an edge before the first block boundary, the aligned middle, an edge behind
the last boundary. The middle goes straight between the drive and the caller's memory. Edges go through a small aligned
bounce buffer; writing an edge is a read-modify-write of its block, alone in that block (`RangeLocks`), so that
concurrent writers of other bytes of the same block lose nothing. Memory at an odd address goes through the bounce
buffer whole, a mebibyte at a time. On a buffered file everything is one part, but writers still announce themselves,
because a file may fall back to buffered while read-modify-writes are under way.

Byte ranges of one file that writers hold: whole-block writers share, a read-modify-write is alone.

A write that covers part of a block must read the block, change some bytes and write it back. While it does so, nobody
else may write the block, or their bytes would be lost. Writers of whole blocks never conflict with each other (what
happens to overlapping bytes is the caller's affair, as with any file). Cost: a scan over the handful of ranges in
flight, about a microsecond.

Host memory as the storage room sees it: a flat run of bytes with a known address.

`host_bytes` turns a contiguous CPU tensor (any dtype, pinned or not) or any object with the buffer protocol into a
1-D numpy `uint8` view without copying. `aligned_bytes` makes page-aligned memory that O_DIRECT accepts everywhere."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch

from outcore.common.quantities import MIB, round_up
from outcore.storage.descriptor import Descriptor
from outcore.storage.errors import StorageError

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20


def host_bytes(buffer: Any, *, writable: bool) -> np.ndarray:
    """A `uint8` view [n_bytes] of `buffer`'s own memory.

    Raises ValueError for a CUDA or non-contiguous tensor, and for read-only memory when `writable` is asked for.
    The view keeps the buffer alive; the caller must not resize it while a transfer runs."""
    if isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu":
            raise ValueError(
                f"the buffer is on {buffer.device}; this engine moves host memory only: "
                "stage it through outcore.staging, or use the kvikio engine"
            )
        if not buffer.is_contiguous():
            raise ValueError(f"the buffer of shape {tuple(buffer.shape)} is not contiguous: pass a contiguous tensor")
        return buffer.detach().reshape(-1).view(torch.uint8).numpy()
    if isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8 and buffer.ndim == 1 and buffer.flags.c_contiguous:
        flat = buffer
    else:
        try:
            view = memoryview(cast(Any, buffer))
            if not view.c_contiguous:
                raise ValueError("the buffer is not contiguous")
            flat = np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)
        except TypeError as error:
            raise ValueError(
                f"cannot move bytes of a {type(buffer).__name__}: "
                "need a CPU tensor or an object with the buffer protocol"
            ) from error
    if writable and flat.size and not flat.flags.writeable:
        raise ValueError("cannot read into this buffer: its memory is read-only (bytes, or a read-only view)")
    return flat


def address_of(view: np.ndarray) -> int:
    """The address of the view's first byte."""
    return view.__array_interface__["data"][0]


def aligned_bytes(n_bytes: int) -> np.ndarray:
    """Fresh zeroed memory [n_bytes], page-aligned, returned to the system when the array is dropped.

    From 2 MiB on it asks for huge pages: the kernel pins every page of an O_DIRECT request, 512 times fewer of them.
    Private, because Python's default (shared) is never backed by huge pages."""
    if n_bytes <= 0:
        return np.empty(0, dtype=np.uint8)
    if not hasattr(mmap, "MAP_PRIVATE"):
        return np.frombuffer(mmap.mmap(-1, n_bytes), dtype=np.uint8)[:n_bytes]
    slack_bytes = HUGE_PAGE_BYTES if n_bytes >= HUGE_PAGE_BYTES else 0
    memory = mmap.mmap(-1, n_bytes + slack_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if slack_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: ordinary ones do
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -address_of(whole) % HUGE_PAGE_BYTES if slack_bytes else 0
    return whole[start : start + n_bytes]


def copy_bytes(target: np.ndarray, source: np.ndarray) -> None:
    """memcpy of equal-length views; ctypes lets other threads run meanwhile, so bounced pieces stay parallel."""
    assert target.nbytes == source.nbytes
    ctypes.memmove(address_of(target), address_of(source), target.nbytes)


Held = tuple[int, int, bool]


class RangeLocks:
    """Shared and exclusive locks on [start, end) byte ranges. A thread holds one range at a time: no deadlock."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._held: list[Held] = []

    def take(self, start: int, end: int, *, exclusive: bool) -> Held:
        """Wait for conflicting holders (the kernel ends their work), then hold [start, end) until `give_back`."""
        with self._changed:
            while any(start < e and s < end and (exclusive or alone) for s, e, alone in self._held):
                self._changed.wait()
            mine = (start, end, exclusive)
            self._held.append(mine)
            return mine

    def give_back(self, mine: Held) -> None:
        with self._changed:
            self._held.remove(mine)
            self._changed.notify_all()


BOUNCE_BYTES = MIB  # one piece of an unaligned transfer; larger gains nothing, the copy is the cost


class BlockSpans:
    """Reads and writes byte ranges of one descriptor. Bounce buffers are kept: one per thread that needed one."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self._block_bytes = descriptor.block_bytes
        self._ranges = RangeLocks()
        self._bounces: deque[np.ndarray] = deque()

    def read(self, view: np.ndarray, offset: int) -> int:
        """Fill `view`; returns the bytes read, fewer than asked only where the file ends."""
        for part, at, aligned in self._parts(view, offset):
            span_read = self._descriptor.read_span if aligned else self._read_bounced
            got = span_read(part, at, part.nbytes)
            if got < part.nbytes:
                return at - offset + got
        return view.nbytes

    def write(self, view: np.ndarray, offset: int) -> None:
        """Write all of `view`. The file must already reach to the end of the last block touched."""
        for part, at, aligned in self._parts(view, offset):
            if aligned:
                held = self._ranges.take(at, at + part.nbytes, exclusive=False)
                try:
                    self._descriptor.write_span(part, at)
                finally:
                    self._ranges.give_back(held)
            else:
                self._write_bounced(part, at)

    def _parts(self, view: np.ndarray, offset: int) -> Iterator[tuple[np.ndarray, int, bool]]:
        """Split into (bytes, file offset, whether it may go without a bounce)."""
        if not self._descriptor.direct:
            yield view, offset, True
            return
        end = offset + view.nbytes
        first, last = round_up(offset, self._block_bytes), end - end % self._block_bytes
        if first >= last or (address_of(view) + first - offset) % self._descriptor.memory_align_bytes:
            yield view, offset, False
            return
        if first > offset:
            yield view[: first - offset], offset, False
        yield view[first - offset : last - offset], first, True
        if end > last:
            yield view[last - offset :], last, False

    def _read_bounced(self, part: np.ndarray, at: int, needed: int) -> int:
        done = 0
        bounce = self._take_bounce()
        try:
            while done < needed:
                start = at + done
                skip = start % self._block_bytes
                take = min(needed - done, bounce.nbytes - skip)
                span = bounce[: round_up(skip + take, self._block_bytes)]
                got = min(self._descriptor.read_span(span, start - skip, skip + take) - skip, take)
                if got > 0:
                    copy_bytes(part[done : done + got], span[skip : skip + got])
                    done += got
                if got < take:
                    break
        finally:
            self._bounces.append(bounce)
        return done

    def _write_bounced(self, part: np.ndarray, at: int) -> None:
        done = 0
        block = self._block_bytes
        bounce = self._take_bounce()
        try:
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
                held = self._ranges.take(start - skip, start - skip + span.nbytes, exclusive=partial)
                try:
                    if partial:
                        self._read_edge(span, start - skip)
                    copy_bytes(span[skip : skip + take], part[done : done + take])
                    self._descriptor.write_span(span, start - skip)
                finally:
                    self._ranges.give_back(held)
                done += take
        finally:
            self._bounces.append(bounce)

    def _read_edge(self, span: np.ndarray, at: int) -> None:
        """Read all of what a write fills in part."""
        got = self._descriptor.read_span(span, at, span.nbytes)
        if got < span.nbytes:
            reason = "the file ended early: it was truncated while in use"
            path, wanted = self._descriptor.path, span.nbytes
            raise StorageError("write", path=path, offset=at, wanted=wanted, got=got, reason=reason)

    def _take_bounce(self) -> np.ndarray:
        try:
            return self._bounces.pop()
        except IndexError:
            return aligned_bytes(max(BOUNCE_BYTES, self._block_bytes))
