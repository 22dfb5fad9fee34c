"""`RequestQueue`: transfers waiting for threads, in order of (priority, submission), handed out piece by piece.

A free thread takes the next *piece* of the first request, so one big request keeps all threads busy and many small ones
run side by side. The queue holds requests and never copies of data. After a failure the rest of that request is not
started, and it counts as ended only when its pieces under way are back, because until then they touch its buffer."""

from __future__ import annotations

import errno as errno_module
import heapq
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import format_s
from outcore.storage.block_file import BlockFile
from outcore.storage.errors import StorageError
from outcore.storage.transfer import Transfer

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
