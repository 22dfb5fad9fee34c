"""Several transfers as one: what leaves in parts is there when the last part is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from outcore.staging import LaneTransfer


class TransferGroup:
    """Several transfers that a caller treats as one `LaneTransfer`. A failure is the first one's."""

    def __init__(self, transfers: Sequence[LaneTransfer]) -> None:
        self._transfers = list(transfers)
        self._left = len(self._transfers)
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Any], object]] = []
        for transfer in self._transfers:
            transfer.add_done_callback(self._one_ended)

    @property
    def error(self) -> BaseException | None:
        errors = [transfer.error for transfer in self._transfers]
        return next((error for error in errors if error is not None), None)

    def done(self) -> bool:
        return self._left == 0

    def wait(self, timeout_s: float | None = None) -> int:
        """Blocks until all are done; the bytes moved."""
        return sum(transfer.wait(timeout_s) for transfer in self._transfers)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        with self._lock:
            if self._left:
                self._callbacks.append(fn)
                return
        fn(self)

    def _one_ended(self, transfer: LaneTransfer) -> None:
        with self._lock:
            self._left -= 1
            callbacks = [] if self._left else self._callbacks
        for fn in callbacks:
            fn(self)
