"""The device's side of a lane: asynchronous copies on streams of the lane's own, and the events that end them.

`CudaStreams` queues cudaMemcpyAsync through torch on its streams and brackets each copy by two events, so that the
device time of the copy is known. `HostStreams` is the null object for machines without CUDA: a copy is a memcpy that
is over when the call returns. Both are safe to use from several threads.

A thread that blocks on the device's events, so that nobody else has to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, Protocol

import torch

Pieces = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(target, source) pairs of 1-D uint8 tensors of equal sizes."""


class CopyEvent(Protocol):
    """The end of one copy."""

    @property
    def is_over(self) -> bool:
        """True without waiting when the copy is known to have ended."""
        ...

    def has_ended(self) -> bool:
        """Asks, without waiting; raises what the device reports."""
        ...

    def synchronize(self) -> None:
        """Blocks (without spinning) until the copy has ended; raises what the device reports."""
        ...

    @property
    def span(self) -> tuple[Any, Any]:
        """First and last moment: timed CUDA events, or seconds on the clock of time.perf_counter."""
        ...


class CopyStreams(Protocol):
    """Streams of one device; `count` of them, numbered from 0, and number `count`, which waits for none of these."""

    @property
    def count(self) -> int: ...

    def is_pinned(self, host: torch.Tensor) -> bool:
        """Tell whether a 1-D uint8 tensor can be copied from and to without a staging slot."""
        ...

    def now(self) -> Any:
        """An event for all the work queued so far on the caller's current stream (None on a CPU)."""
        ...

    def copy(self, index: int, target: torch.Tensor, source: torch.Tensor, after: Any) -> CopyEvent:
        """Queues `target` <- `source` (1-D uint8, equal sizes) on stream `index`, once the event `after` has passed."""
        ...

    def copy_pieces(self, index: int, pieces: Pieces, after: Any) -> CopyEvent:
        """Queues several copies (target, source) back to back as one: nothing between them slows the link."""
        ...

    def hold(self, stream: Any, event: CopyEvent) -> None:
        """Makes `stream` (None: the caller's current one) wait for the copy, without blocking the host."""
        ...

    def ambient(self) -> AbstractContextManager[Any]:
        """Makes stream 0 the current stream of this thread."""
        ...


class FinishedCopy:
    """A copy that ended before the call returned."""

    is_over = True

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.span = (begin_s, end_s)

    def has_ended(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class HostStreams:
    """Copies between CPU tensors, at once."""

    count = 1

    def is_pinned(self, host: torch.Tensor) -> bool:
        return False

    def now(self) -> None:
        return None

    def copy(self, index: int, target: torch.Tensor, source: torch.Tensor, after: Any) -> FinishedCopy:
        return self.copy_pieces(index, [(target, source)], after)

    def copy_pieces(self, index: int, pieces: Pieces, after: Any) -> FinishedCopy:
        begin_s = time.perf_counter()
        with torch.inference_mode():  # also writes tensors that were made in inference mode
            for target, source in pieces:
                target.copy_(source)
        return FinishedCopy(begin_s, time.perf_counter())

    def hold(self, stream: Any, event: CopyEvent) -> None:
        return

    def ambient(self) -> AbstractContextManager[Any]:
        return nullcontext()


class CudaCopy:
    """A copy queued on a CUDA stream."""

    is_over = False

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self.begin = begin
        self.end = end

    @property
    def span(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return self.begin, self.end

    def has_ended(self) -> bool:
        return self.end.query()

    def synchronize(self) -> None:
        self.end.synchronize()


class CudaStreams:
    """`count` streams for copies on a CUDA device and one more. torch takes them from its pool of 32 per device."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.count = count
        self.device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(count + 1)]

    def is_pinned(self, host: torch.Tensor) -> bool:
        # Both ends: a view across the end of a pinned region would be copied synchronously, or refused.
        return bool(host.is_pinned()) and bool(host[-1:].is_pinned())

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def copy(self, index: int, target: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None) -> CudaCopy:
        return self.copy_pieces(index, [(target, source)], after)

    def copy_pieces(self, index: int, pieces: Pieces, after: torch.cuda.Event | None) -> CudaCopy:
        # Two events around all of them: a pair around each 16 MiB cost 3.5 % of PCIe 5.0 x16 (measured).
        stream = self._streams[index]
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.inference_mode(), torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            begin.record(stream)
            for target, source in pieces:
                target.copy_(source, non_blocking=True)
            end.record(stream)
        return CudaCopy(begin, end)

    def hold(self, stream: torch.cuda.Stream | None, event: CopyEvent) -> None:
        assert isinstance(event, CudaCopy)
        event.end.wait(stream if stream is not None else torch.cuda.current_stream(self.device))

    def ambient(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[0])


def open_streams(device: torch.device, count: int) -> CopyStreams:
    """The streams for `device`; ValueError for a device that is neither CUDA nor the CPU."""
    if count < 1:
        raise ValueError(f"a lane needs at least one stream, got {count}")
    if device.type == "cuda":
        return CudaStreams(device, count)
    if device.type == "cpu":
        return HostStreams()
    raise ValueError(f"lanes serve CUDA devices and the CPU, not {device.type!r}")


def whole_device(device: torch.device | str) -> torch.device:
    """cuda -> cuda:0 (the current one), so that it compares equal to a tensor's device."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class CopyWaiter:
    """A thread that waits for events in order and calls `then(error)`; it ends with `close`."""

    def __init__(self, name: str) -> None:
        self._events: SimpleQueue[tuple[Any, Callable[[BaseException | None], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, event: Any, then: Callable[[BaseException | None], None]) -> None:
        """`event` has a `synchronize()`."""
        self._events.put((event, then))

    def _run(self) -> None:
        while True:
            item = self._events.get()
            if item is None:
                return
            event, then = item
            error: BaseException | None = None
            try:
                event.synchronize()
            except Exception as raised:  # the device reports a fault: the transfer's, not this thread's
                error = raised
            then(error)
            del item, event, then, error  # an idle thread keeps no tensor alive

    def close(self, timeout_s: float) -> None:
        self._events.put(None)
        self._thread.join(timeout_s)
