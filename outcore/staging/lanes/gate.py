"""`Gate`: device memory that is promised to a transfer before it is known when it will be free.

A lane reads ahead for a gated transfer into its slots, as far as they reach, and copies to the device only once the
gate has been opened. This is how a drive stays busy although the device has room for two or three layers: the reads for
the layers behind them wait in pinned memory, where they are in order of need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Gate:
    """For `after=` of a lane's file and store transfers. Settled once: opened, or cancelled. Thread-safe.

    The first gate in a lane must be opened without waiting for any transfer behind it in the same lane, because slots
    filled for it are free again only then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settled = False
        self._callbacks: list[Callable[[], object]] = []
        self.after: Any = None
        """The event that the first copy waits for; None: nothing."""
        self.error: BaseException | None = None

    @property
    def is_settled(self) -> bool:
        return self._settled

    def open(self, after: Any = None) -> None:
        """Copies may go, once the event `after` has passed (None: at once)."""
        self._settle(after, None)

    def cancel(self, error: BaseException) -> None:
        """The transfer fails with `error`, and reads nothing more. After `open` it does nothing."""
        self._settle(None, error)

    def when_settled(self, fn: Callable[[], object]) -> None:
        """Calls `fn()` when it is settled, on the thread that does it, or now."""
        with self._lock:
            if not self._settled:
                self._callbacks.append(fn)
                return
        fn()

    def _settle(self, after: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._settled:
                return
            self.after, self.error, self._settled = after, error, True
            callbacks, self._callbacks = self._callbacks, []
        for fn in callbacks:
            fn()
