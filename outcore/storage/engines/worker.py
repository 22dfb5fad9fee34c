"""`WorkerEngine`: threads that take pieces of requests from a queue and have a *mover* move them.

The posix and kvikio engines differ only in their mover. Workers are daemon threads that an exit handler lets finish, so
a program that forgets `close()` neither hangs at exit nor stops in the middle of a write. Closing goes on as long as
pieces end; when none does for a while the drive hangs, and its threads are left to the process's end.

`PosixEngine`: plain threads around positional reads and writes; works everywhere and needs no package.

Python is no bottleneck for the requests of this project (1 MiB and more): preadv and pwritev release the GIL, and a
piece of 8 MiB takes milliseconds against some fifty microseconds of Python. Measured on a 2-core machine with a virtual
drive: 4, 8 and 16 threads with 8 MiB pieces move what fio moves with libaio.
Eight threads are the default because a drive of several GB/s wants some 64 MiB in flight; more threads help no drive
here.

io_uring was measured beside it (the package `pyuring` 0.3.0, and fio's own io_uring engine): the same rates from 1 MiB
on, about half the CPU time, and three times the operations per second at 4 KiB (63,000 against 20,000), which this
project does not issue. Many containers refuse it; the package `liburing` 2026.3 takes only `bytearray` (no pinned
memory) and asks for Linux 6.14; `pyuring` is one person's toolkit. Not adopted.

The GIL shows once: while another thread computes in pure Python, a worker waits up to the switch interval (5 ms) after
each piece. Pieces of 32 MiB keep the rate then (measured 2.0 GB/s against 1.6 with 8 MiB and 2.1 undisturbed).

`RequestQueue`: transfers waiting for threads, in order of (priority, submission), handed out piece by piece.

A free thread takes the next *piece* of the first request, so one big request keeps all threads busy and many small ones
run side by side. The queue holds requests and never copies of data. After a failure the rest of that request is not
started, and it counts as ended only when its pieces under way are back, because until then they touch its buffer."""

from __future__ import annotations

import errno as errno_module
import heapq
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import numpy as np

from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import MIB, format_gb, format_s
from outcore.storage.block_file import BlockFile, check_offset
from outcore.storage.block_spans import host_bytes
from outcore.storage.errors import StorageError, Transfer

Kind = Literal["read", "write"]

PIECE_ALIGN_BYTES = 4096  # pieces of one request never share a block


@dataclass(slots=True, eq=False)
class IoRequest:
    """A submitted transfer and how far its pieces are; guarded by the queue's lock.

    `view`: anything with `nbytes` and byte-wise slicing (a numpy or torch uint8 vector). `before`: called once by each
    piece's thread before it moves bytes (waiting for a CUDA event, for instance)."""

    kind: Kind
    file: BlockFile
    offset: int
    view: Any
    piece_bytes: int = field(kw_only=True)
    transfer: Transfer = field(kw_only=True)
    before: Any = field(default=None, kw_only=True)
    next: int = 0
    in_flight: int = 0
    started_s: float = 0.0
    """When a thread took its first piece, on the clock of time.perf_counter."""
    error: BaseException | None = None

    @property
    def all_taken(self) -> bool:
        return self.next >= self.view.nbytes

    @property
    def num_pieces(self) -> int:
        return -(-self.view.nbytes // self.piece_bytes)

    def take_piece(self) -> tuple[int, int]:
        start = self.next
        if not start:
            self.started_s = time.perf_counter()
        stop = start + self.piece_bytes
        if stop < self.view.nbytes:
            stop -= (self.offset + stop) % PIECE_ALIGN_BYTES  # cut on a block boundary of the file
            stop = stop if stop > start else start + self.piece_bytes
        self.next = min(stop, self.view.nbytes)
        self.in_flight += 1
        return start, self.next


class RequestQueue:
    """Shared by the threads of one engine. They hold this and not the engine, so that a forgotten engine can end."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.pieces_done = 0
        """Ended well or badly since the start: what tells a slow drive from one that hangs."""
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_room = threading.Condition(self._lock)
        self._heap: list[tuple[int, int, IoRequest]] = []
        self._sequence = 0
        self._closed = False
        self._worker_ids: set[int] = set()

    def add_worker(self) -> None:
        """The calling thread serves this queue: it never waits for room, which only workers make."""
        with self._lock:
            self._worker_ids.add(threading.get_ident())

    def put(self, request: IoRequest, priority: int) -> None:
        """Queue a request; waits while `max_requests` wait already. Raises RuntimeError when closed, TimeoutError when
        no room came: the request was not taken."""
        with self._lock:
            if threading.get_ident() not in self._worker_ids and not self._has_room.wait_for(
                lambda: len(self._heap) < self.max_requests or self._closed, TIMEOUT_S
            ):
                raise TimeoutError(
                    f"{request.transfer.what} found no room within {format_s(TIMEOUT_S)}: {self.max_requests} "
                    "requests wait for the drive, which hangs"
                )
            if self._closed:
                raise RuntimeError("the storage engine is closed: submit before close(), or open a new engine")
            heapq.heappush(self._heap, (priority, self._sequence, request))
            self._sequence += 1
            self._has_work.notify(request.num_pieces)

    def take(self) -> tuple[IoRequest, int, int] | None:
        """The next piece as (request, start, stop); waits for one; None when the queue is closed and empty."""
        with self._lock:
            while not self._heap:
                if self._closed:
                    return None
                self._has_work.wait()
            request = self._heap[0][2]
            start, stop = request.take_piece()
            if request.all_taken:
                heapq.heappop(self._heap)
                self._has_room.notify()
            return request, start, stop

    def piece_done(self, request: IoRequest, error: BaseException | None) -> bool:
        """Count a piece; True when its request has ended with it."""
        with self._lock:
            self.pieces_done += 1
            request.in_flight -= 1
            if error is not None and request.error is None:
                request.error = error
                if not request.all_taken:
                    request.next = request.view.nbytes
                    self._heap = [entry for entry in self._heap if entry[2] is not request]
                    heapq.heapify(self._heap)
                    self._has_room.notify()
            return request.in_flight == 0 and request.all_taken

    def shut(self, *, cancel: bool) -> list[IoRequest]:
        """Take no more requests. With `cancel`, drop what has not begun; returns requests that ended by it."""
        with self._lock:
            self._closed = True
            ended = []
            if cancel:
                for _, _, request in self._heap:
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
                self._heap = []
            self._has_work.notify_all()
            self._has_room.notify_all()
            return ended


logger = logging.getLogger(__name__)

STALL_S = 60.0
"""Without the end of a piece (8 MiB): then the drive hangs. Twice the kernel's own limit of one SCSI command."""
JOIN_SLICE_S = 0.5
"""Seconds between two looks at whether pieces still end, while the engine closes."""
WARN_EVERY_S = 60.0


class Mover(Protocol):
    """Protocol of the calls that move an engine's bytes."""

    def prepare(self, buffer: Any, *, writable: bool) -> tuple[Any, Callable[[], object] | None]:
        """Make, on the submitting thread, a flat byte view of `buffer`, and what to wait for before touching it."""
        ...

    def move(self, kind: Kind, file: BlockFile, offset: int, piece: Any) -> None:
        """Move the whole piece, on a worker, or raise."""
        ...


class WorkerEngine:
    """Base of the engines with threads. See `StorageEngine` for the calls."""

    name = "worker"

    def __init__(self, mover: Mover, *, num_threads: int, block_bytes: int, max_requests: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        if block_bytes < PIECE_ALIGN_BYTES or block_bytes % PIECE_ALIGN_BYTES:
            raise ValueError(f"block_bytes must be a positive multiple of {PIECE_ALIGN_BYTES}, got {block_bytes}")
        if max_requests < 1:
            raise ValueError(f"max_requests must be at least 1, got {max_requests}")
        self.num_threads = num_threads
        self.block_bytes = block_bytes
        self._mover = mover
        self._queue = RequestQueue(max_requests)
        self._threads = [
            threading.Thread(target=_work, args=(self._queue, mover), name=f"outcore-io-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        # Runs when the engine is collected and at interpreter exit, before daemon threads are frozen mid-write.
        self._finalizer = weakref.finalize(self, _shut_down, self._queue, self._threads, cancel=False)
        self.on_finished: Callable[[IoRequest, float], object] | None = None
        """Hears of every request that has ended and when (time.perf_counter), on a worker's thread (for a trace)."""

    def submit_read(self, file: BlockFile, offset: int, buffer: Any, *, priority: int = 0) -> Transfer:
        """Fill `buffer` from `file` at byte `offset`; returns at once. The buffer is the engine's until done.

        Raises ValueError for a buffer this engine cannot move, RuntimeError when closed or in a forked child."""
        return self._submit("read", file, offset, buffer, priority)

    def submit_write(self, file: BlockFile, offset: int, buffer: Any, *, priority: int = 0) -> Transfer:
        """Write `buffer` to `file` at byte `offset`; returns at once. Do not change the buffer until done."""
        return self._submit("write", file, offset, buffer, priority)

    def _submit(self, kind: Kind, file: BlockFile, offset: int, buffer: Any, priority: int) -> Transfer:
        if os.getpid() != self._queue.pid:
            raise RuntimeError(
                "this storage engine belongs to the parent of this forked process and has no threads here: open an "
                "engine in the process that uses it (DataLoader workers, multiprocessing: start method 'spawn')"
            )
        check_offset(offset)
        view, before = self._mover.prepare(buffer, writable=kind == "read")
        if kind == "write" and not file.writable:
            raise StorageError("write", path=file.path, offset=offset, wanted=view.nbytes, reason="opened read-only")
        what = f"{kind} of {format_gb(view.nbytes)} at offset {offset} of {file.path}"
        transfer = Transfer(view.nbytes, what, self._is_alive)
        if not view.nbytes:
            transfer.finish()
            return transfer
        request = IoRequest(kind, file, offset, view, piece_bytes=self.block_bytes, transfer=transfer, before=before)
        if (hear := self.on_finished) is not None:
            transfer.add_done_callback(lambda _: hear(request, time.perf_counter()))
        self._queue.put(request, priority)
        return transfer

    def _is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def close(self, *, cancel: bool = False, stall_s: float = STALL_S) -> None:
        """Finish all submitted requests (or with `cancel` fail those not begun) and end the threads.

        TimeoutError when no piece has ended for `stall_s`: the threads that hang stay, and so must their buffers."""
        self._finalizer.detach()
        hanging = _end_threads(self._queue, self._threads, cancel=cancel, stall_s=stall_s)
        if hanging:
            raise TimeoutError(_in_words(hanging, stall_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, *exc_info: object) -> None:
        self.close(cancel=exc_type is not None)


def _work(queue: RequestQueue, mover: Mover) -> None:
    queue.add_worker()
    while True:
        taken = queue.take()
        if taken is None:
            return
        request, start, stop = taken
        error: BaseException | None = None
        try:
            if request.before is not None:
                request.before()
            mover.move(request.kind, request.file, request.offset + start, request.view[start:stop])
        except BaseException as raised:  # delivered to whoever waits; the thread lives on
            error = raised
        if queue.piece_done(request, error):
            request.transfer.finish(request.error)
        del taken, request, error  # an idle thread keeps no buffer alive


def _shut_down(queue: RequestQueue, threads: list[threading.Thread], *, cancel: bool) -> None:
    """Close an engine that nobody closed, at the interpreter's exit among others: nobody is there to hear of an
    error."""
    hanging = _end_threads(queue, threads, cancel=cancel, stall_s=STALL_S)
    if hanging:
        logger.error("%s", _in_words(hanging, STALL_S))


def _end_threads(
    queue: RequestQueue, threads: list[threading.Thread], *, cancel: bool, stall_s: float
) -> list[threading.Thread]:
    """Let the threads finish, as long as pieces end; those that hang."""
    if os.getpid() != queue.pid:
        return []  # a forked child has none of the threads
    for request in queue.shut(cancel=cancel):
        request.transfer.finish(request.error)
    moved_s = warned_s = since_s = time.monotonic()
    seen = queue.pieces_done
    while alive := [t for t in threads if t.is_alive() and t is not threading.current_thread()]:
        alive[0].join(min(JOIN_SLICE_S, stall_s))
        now_s = time.monotonic()
        if queue.pieces_done != seen:
            seen, moved_s = queue.pieces_done, now_s
        elif now_s - moved_s >= stall_s:
            return [thread for thread in alive if thread.is_alive()]
        if now_s - warned_s >= WARN_EVERY_S:
            warned_s = now_s
            logger.warning("closing the storage engine: at it for %s, the drive still moves", format_s(now_s - since_s))
    return []


def _in_words(hanging: list[threading.Thread], stall_s: float) -> str:
    return (
        f"closing the storage engine: nothing has moved for {format_s(stall_s)}, {len(hanging)} of its threads hang in "
        "the drive (dmesg may say why) and are left to the end of the process"
    )


class PosixMover:
    """Host memory through `BlockFile`'s own blocking calls."""

    def prepare(self, buffer: Any, *, writable: bool) -> tuple[np.ndarray, Callable[[], object] | None]:
        return host_bytes(buffer, writable=writable), None

    def move(self, kind: Kind, file: BlockFile, offset: int, piece: np.ndarray) -> None:
        if kind == "read":
            file.read_into(piece, offset)
        else:
            file.write_from(piece, offset)


class PosixEngine(WorkerEngine):
    """Threads that read and write `BlockFile`s from and into host memory.

    `num_threads`: pieces in flight at most. `block_bytes`: largest piece of one system call. `max_requests`: queued
    requests beyond which `submit_*` waits (back-pressure; memory stays bounded)."""

    name = "posix"

    def __init__(self, num_threads: int = 8, block_bytes: int = 8 * MIB, max_requests: int = 65536) -> None:
        super().__init__(PosixMover(), num_threads=num_threads, block_bytes=block_bytes, max_requests=max_requests)
