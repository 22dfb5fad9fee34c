"""`PosixEngine`: plain threads around positional reads and writes; works everywhere and needs no package.

Algorithm: requests wait in one heap ordered by (priority, submission). A free thread takes the next *piece* of the
first request, so one big request keeps all threads busy and many small ones run side by side; the queue holds requests,
never copies of data. Python is no bottleneck: preadv and pwritev release the GIL, and a piece of 8 MiB takes
milliseconds against some ten microseconds of Python.
"""

from __future__ import annotations

import errno as errno_module
import heapq
import logging
import os
import threading
import time
import weakref
from typing import Any, Literal

import numpy as np

from outcore.storage.block_file import BlockFile
from outcore.storage.errors import StorageError
from outcore.storage.host_buffer import host_bytes
from outcore.storage.transfer import Transfer
from outcore.units import MIB

logger = logging.getLogger(__name__)

PIECE_ALIGN_BYTES = 4096  # pieces of one request never share a block
JOIN_S = 60.0

Kind = Literal["read", "write"]


class _Request:
    """A submitted transfer and how far its pieces are; guarded by the queue's lock."""

    __slots__ = ("error", "file", "in_flight", "kind", "next", "offset", "piece_bytes", "transfer", "view")

    def __init__(
        self, kind: Kind, file: BlockFile, offset: int, view: np.ndarray, piece_bytes: int, transfer: Transfer
    ):
        self.kind = kind
        self.file = file
        self.offset = offset
        self.view = view
        self.piece_bytes = piece_bytes
        self.transfer = transfer
        self.next = 0
        self.in_flight = 0
        self.error: BaseException | None = None

    @property
    def all_taken(self) -> bool:
        return self.next >= self.view.nbytes

    def take_piece(self) -> tuple[int, int]:
        start = self.next
        stop = start + self.piece_bytes
        if stop < self.view.nbytes:
            stop -= (self.offset + stop) % PIECE_ALIGN_BYTES  # cut on a block boundary of the file
        self.next = min(stop, self.view.nbytes)
        self.in_flight += 1
        return start, self.next


class _Queue:
    """What the threads share. They hold this and not the engine, so that a forgotten engine can be collected."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.lock = threading.Lock()
        self.has_work = threading.Condition(self.lock)
        self.has_room = threading.Condition(self.lock)
        self.heap: list[tuple[int, int, _Request]] = []
        self.sequence = 0
        self.closed = False
        self.thread_ids: set[int] = set()
        self.pid = os.getpid()

    def put(self, request: _Request, priority: int, n_pieces: int) -> None:
        with self.lock:
            while len(self.heap) >= self.max_requests and not self.closed:
                if threading.get_ident() in self.thread_ids:
                    break  # a callback on a worker must not wait for workers
                self.has_room.wait()
            if self.closed:
                raise RuntimeError("the storage engine is closed: submit before close(), or open a new engine")
            heapq.heappush(self.heap, (priority, self.sequence, request))
            self.sequence += 1
            self.has_work.notify(n_pieces)

    def take(self) -> tuple[_Request, int, int] | None:
        with self.lock:
            while not self.heap:
                if self.closed:
                    return None
                self.has_work.wait()
            request = self.heap[0][2]
            start, stop = request.take_piece()
            if request.all_taken:
                heapq.heappop(self.heap)
                self.has_room.notify()
            return request, start, stop

    def piece_done(self, request: _Request, error: BaseException | None) -> bool:
        """Count a piece; True when it was the last of its request. After a failure the rest is not started."""
        with self.lock:
            request.in_flight -= 1
            if error is not None and request.error is None:
                request.error = error
                if not request.all_taken:
                    request.next = request.view.nbytes
                    self.heap = [entry for entry in self.heap if entry[2] is not request]
                    heapq.heapify(self.heap)
                    self.has_room.notify()
            return request.in_flight == 0 and request.all_taken

    def shut(self, *, cancel: bool) -> list[_Request]:
        """Take no more requests; with `cancel` also drop what has not begun and return requests that end thereby."""
        with self.lock:
            self.closed = True
            ended = []
            if cancel:
                for _, _, request in self.heap:
                    request.next = request.view.nbytes
                    request.error = request.error or StorageError(
                        request.kind,
                        path=request.file.path,
                        offset=request.offset,
                        wanted=request.view.nbytes,
                        errno=errno_module.ECANCELED,
                        reason="the engine was closed",
                    )
                    if request.in_flight == 0:
                        ended.append(request)
                self.heap = []
            self.has_work.notify_all()
            self.has_room.notify_all()
            return ended


def _move(request: _Request, start: int, stop: int) -> None:
    piece = request.view[start:stop]
    if request.kind == "read":
        request.file.read_into(piece, request.offset + start)
    else:
        request.file.write_from(piece, request.offset + start)


def _work(queue: _Queue) -> None:
    with queue.lock:
        queue.thread_ids.add(threading.get_ident())
    while True:
        taken = queue.take()
        if taken is None:
            return
        request, start, stop = taken
        error: BaseException | None = None
        try:
            _move(request, start, stop)
        except BaseException as raised:  # delivered to whoever waits; the thread lives on
            error = raised
        if queue.piece_done(request, error):
            request.transfer.finish(request.error)
        del taken, request, error  # an idle thread keeps no buffer alive


class PosixEngine:
    """Threads that read and write `BlockFile`s. See `StorageEngine` for the calls.

    `num_threads`: pieces in flight at most. `block_bytes`: largest piece of one system call. `max_requests`: queued
    requests beyond which `submit_*` waits (back-pressure; memory stays bounded).
    """

    name = "posix"

    def __init__(self, num_threads: int = 8, block_bytes: int = 8 * MIB, max_requests: int = 65536) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        if block_bytes < PIECE_ALIGN_BYTES or block_bytes % PIECE_ALIGN_BYTES:
            raise ValueError(f"block_bytes must be a positive multiple of {PIECE_ALIGN_BYTES}, got {block_bytes}")
        if max_requests < 1:
            raise ValueError(f"max_requests must be at least 1, got {max_requests}")
        self.num_threads = num_threads
        self.block_bytes = block_bytes
        self._queue = _Queue(max_requests)
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name=f"outcore-io-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        # Also runs at interpreter exit, before daemon threads are frozen in the middle of a write.
        self._finalizer = weakref.finalize(self, _shut_down, self._queue, self._threads, cancel=False)

    def submit_read(self, file: BlockFile, offset: int, buffer: Any, *, priority: int = 0) -> Transfer:
        """Fill `buffer` from `file` at `offset`. The buffer is the engine's until the transfer is done."""
        return self._submit("read", file, offset, host_bytes(buffer, writable=True), priority)

    def submit_write(self, file: BlockFile, offset: int, buffer: Any, *, priority: int = 0) -> Transfer:
        """Write `buffer` to `file` at `offset`. Do not change the buffer until the transfer is done."""
        return self._submit("write", file, offset, host_bytes(buffer, writable=False), priority)

    def _submit(self, kind: Kind, file: BlockFile, offset: int, view: np.ndarray, priority: int) -> Transfer:
        if os.getpid() != self._queue.pid:
            raise RuntimeError(
                "this storage engine belongs to the parent of this forked process and has no threads here: open an "
                "engine in the process that uses it (DataLoader workers, multiprocessing: start method 'spawn')"
            )
        if not isinstance(offset, int) or offset < 0:
            raise ValueError(f"offset must be a non-negative integer, got {offset!r}")
        if kind == "write" and not file.writable:
            raise StorageError("write", path=file.path, offset=offset, wanted=view.nbytes, reason="opened read-only")
        transfer = Transfer(view.nbytes, f"{kind} of {view.nbytes} bytes at {offset} of {file.path}", self._is_alive)
        if not view.nbytes:
            transfer.finish()
            return transfer
        request = _Request(kind, file, offset, view, self.block_bytes, transfer)
        self._queue.put(request, priority, -(-view.nbytes // self.block_bytes))
        return transfer

    def _is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def close(self, *, cancel: bool = False) -> None:
        """Finish all submitted requests (or with `cancel` fail those not begun) and end the threads."""
        self._finalizer.detach()
        _shut_down(self._queue, self._threads, cancel=cancel)

    def __enter__(self) -> PosixEngine:
        return self

    def __exit__(self, exc_type: object, *exc_info: object) -> None:
        self.close(cancel=exc_type is not None)


def _shut_down(queue: _Queue, threads: list[threading.Thread], *, cancel: bool) -> None:
    if os.getpid() != queue.pid:
        return  # a forked child has none of the threads
    for request in queue.shut(cancel=cancel):
        request.transfer.finish(request.error)
    waited_since = time.monotonic()
    for thread in threads:
        while thread.is_alive() and thread is not threading.current_thread():
            thread.join(JOIN_S)
            if thread.is_alive():
                logger.warning(
                    "closing the storage engine: still waiting for the drive after %.0f s",
                    time.monotonic() - waited_since,
                )
