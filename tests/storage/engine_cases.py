"""What the tests of the storage engines share."""

import os
import threading

import pytest

WAIT_S = 60.0  # no test waits longer; a hang is a failure


class Gate:
    """Holds every pread back until opened, and notes their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.offsets: list[int] = []
        real = os.preadv

        def gated(fd: int, buffers: list, offset: int) -> int:
            self.offsets.append(offset)
            self.entered.release()
            assert self.opened.wait(WAIT_S)
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", gated)
