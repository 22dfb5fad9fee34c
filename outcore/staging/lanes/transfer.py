"""`LaneTransfer`: the receipt of one transfer through a lane.

It passes two points. *Issued*: every byte's copy has been queued on the lane's streams, so other streams can be made to
wait for it (`wait_stream`). *Done*: every byte has arrived, on the device for uploads and in its home for downloads
(`wait`). A failure is raised at both, on the thread that asks, and only once nothing of the transfer is in flight any
more, so that its buffers may be dropped or used again by then. Every wait ends: by default after the lane's timeout."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outcore.common.quantities import format_gib, format_s
from outcore.staging.lanes.copy_streams import CopyEvent, CopyStreams
from outcore.staging.lanes.homes import Home
from outcore.staging.lanes.slots import Gate

logger = logging.getLogger(__name__)


class LaneClosed(RuntimeError):
    """The lane was closed before this transfer had begun, or before it was submitted."""


class TransferLane(Protocol):
    """Protocol of a lane, as its transfers see it."""

    streams: CopyStreams
    timeout_s: float

    def describe(self) -> str:
        """Text for messages: how many transfers wait, and for what."""
        ...


@dataclass(frozen=True)
class Unwatched:
    """A queued copy that only the device has to know of (its stream keeps the order)."""

    copy: CopyEvent
    watch: Callable[[], None]
    """Have a thread wait for its end."""
    end: Callable[[], None]
    """Called when a transfer has ended well, to count it."""


class LaneTransfer:
    """Made by a lane's `submit` and `submit_host`."""

    def __init__(
        self, lane: TransferLane, what: str, device_bytes: torch.Tensor, home: Home | None, after: Any, label: str = ""
    ) -> None:
        self.n_bytes = device_bytes.numel()
        self.what = what
        self.label = label
        """Whose bytes they are, for messages and traces."""
        self._lane = lane
        self._condition = threading.Condition()
        self._issued_bytes = 0
        self._done_bytes = 0
        self._in_flight = 0
        self._error: BaseException | None = None
        self._error_seen = False
        self._finished = False
        self._unwatched: Unwatched | None = None
        self._copies: dict[int, CopyEvent] = {}
        self._callbacks: list[Callable[[LaneTransfer], object]] = []
        # The lane's side: kept alive until nothing is in flight.
        self.device_bytes: torch.Tensor | None = device_bytes
        self.home = home
        self.next_bytes = 0
        self._after = after
        self._ordered_streams: set[int] = set()

    # ------------------------------------------------------------------ for callers

    def wait(self, timeout_s: float | None = None) -> int:
        """Blocks until done; the bytes moved. Raises the transfer's failure, or TimeoutError (it goes on)."""
        if not self.done():
            self.have_watched()
        self._block(lambda: self._finished, timeout_s, "done")
        return self.n_bytes

    def wait_stream(self, stream: torch.cuda.Stream | None = None, timeout_s: float | None = None) -> None:
        """Makes work queued on `stream` from now on (None: the current stream) wait for this transfer's copies.

        Blocks the host until the copies are issued, for a drive transfer that is until its reads (uploads) or all but
        its last writes (downloads) are done, but never for the copies themselves. After it the stream may read an
        upload's `out`, or overwrite a download's `src`. Raises the transfer's failure, or TimeoutError."""
        self._block(lambda: self._finished or self._issued_bytes == self.n_bytes, timeout_s, "issued")
        with self._condition:
            copies = [] if self._finished else list(self._copies.values())
        for copy in copies:
            self._lane.streams.hold(stream, copy)

    def done(self) -> bool:
        """True once the transfer has ended, well or badly."""
        if self._unwatched is not None:
            self._look()
        return self._finished

    @property
    def error(self) -> BaseException | None:
        """Failure of the transfer; None while there is none. Reading it counts as handling it, so it is not logged
        again."""
        self._error_seen = True
        return self._error

    def add_done_callback(self, fn: Callable[[LaneTransfer], object]) -> None:
        """Calls `fn(transfer)` when it ends, on the lane's thread (it must not block), or now if it has ended."""
        with self._condition:
            waits = not self._finished
            if waits:
                self._callbacks.append(fn)
        if waits:
            self.have_watched()
        else:
            fn(self)

    def _block(self, is_there: Callable[[], bool], timeout_s: float | None, goal: str) -> None:
        limit_s = self._lane.timeout_s if timeout_s is None else timeout_s
        with self._condition:
            arrived = self._condition.wait_for(is_there, limit_s)
            counts = (self._done_bytes, self._issued_bytes, self._in_flight)
        if not arrived:
            done_bytes, issued_bytes, in_flight = counts
            raise TimeoutError(
                f"{self.what} is not {goal} after {format_s(limit_s)}: {format_gib(done_bytes)} of "
                f"{format_gib(self.n_bytes)} done, {format_gib(issued_bytes)} issued, {in_flight} chunks in flight; "
                f"{self._lane.describe()}. "
                "It goes on; wait again, or look at the drive (dmesg) and the GPU (nvidia-smi) if nothing moves"
            )
        if self._finished and self._error is not None:
            self._error_seen = True
            raise self._error

    def __repr__(self) -> str:
        state = "under way" if not self._finished else "done" if self._error is None else f"failed: {self._error}"
        return f"LaneTransfer({self.what}, {state})"

    def __del__(self) -> None:
        error = getattr(self, "_error", None)
        if error is not None and not self._error_seen and not isinstance(error, LaneClosed):
            logger.error("nobody waited for a transfer that failed: %s: %s", self.what, error)

    def _look(self) -> None:
        with self._condition:
            unwatched = self._unwatched
            if unwatched is None:
                return
            try:
                if not unwatched.copy.has_ended():
                    return
            except RuntimeError:
                return  # the lane's thread finds the same when it waits, and tells everybody
            self._unwatched = None
        unwatched.end()

    # ------------------------------------------------------------------ for the lane

    def leave_unwatched(self, unwatched: Unwatched) -> None:
        """Start no waiter thread for this copy until somebody on the host asks whether it has ended."""
        with self._condition:
            self._unwatched = unwatched

    def have_watched(self) -> None:
        """From now on the lane's threads wait for its end, and say so."""
        with self._condition:
            unwatched, self._unwatched = self._unwatched, None
        if unwatched is not None:
            unwatched.watch()

    @property
    def failure(self) -> BaseException | None:
        """`error` for the lane's own eyes."""
        return self._error

    @property
    def is_begun(self) -> bool:
        """Nothing is left to start: all chunks are under way, or the transfer failed."""
        return self._error is not None or self.next_bytes >= self.n_bytes

    @property
    def gate(self) -> Gate | None:
        """Gate that copies to the device wait for; None when they may go at once."""
        return self._after if isinstance(self._after, Gate) else None

    def after_for(self, stream_index: int) -> Any:
        """The event that a stream's first copy has to wait for; None for its later ones, which are behind that one."""
        if stream_index in self._ordered_streams:
            return None
        self._ordered_streams.add(stream_index)
        gate = self.gate
        return self._after if gate is None else gate.after

    def begin_chunk(self) -> None:
        with self._condition:
            self._in_flight += 1

    def note_issued(self, n_bytes: int, stream_index: int, copy: CopyEvent | None) -> None:
        """`n_bytes` more are queued on a stream (or, without `copy`, have moved without one)."""
        with self._condition:
            self._issued_bytes += n_bytes
            if copy is not None:
                self._copies[stream_index] = copy
            if self._issued_bytes == self.n_bytes:
                self._condition.notify_all()

    def end_chunk(self, n_bytes: int, error: BaseException | None) -> bool:
        """Counts a chunk out; True when it was the last and the transfer is to be finished."""
        with self._condition:
            self._in_flight -= 1
            if error is None:
                self._done_bytes += n_bytes
        return self.fail(error) if error is not None else self._is_over()

    def fail(self, error: BaseException) -> bool:
        """Starts no further chunk; True when nothing is in flight and the transfer is to be finished."""
        with self._condition:
            self._error = self._error or error
        return self._is_over()

    def _is_over(self) -> bool:
        with self._condition:
            return not self._in_flight and (self._error is not None or self._done_bytes == self.n_bytes)

    def finish(self) -> None:
        """End the transfer, once: wake the threads that wait, and release the buffers."""
        with self._condition:
            if self._finished:
                return
            self._finished = True
            self.device_bytes = self.home = self._after = None
            self._copies.clear()
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for fn in callbacks:
            try:
                fn(self)
            except Exception:
                logger.exception("a callback of %s raised", self.what)
