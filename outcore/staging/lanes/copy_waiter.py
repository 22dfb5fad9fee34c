"""A thread that blocks on the device's events, so that nobody else has to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


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
