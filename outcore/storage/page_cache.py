"""`WriteBehind`: keeps the page cache small behind buffered writes.

Buffered writes only copy into RAM, and gigabytes of dirty pages would push the training process's own memory out. So
the kernel is asked to start writing each range at once, and ranges that are a window behind are waited for and dropped.
"""

from __future__ import annotations

import errno as errno_module
import threading
from collections import deque

from outcore.common.quantities import MIB
from outcore.storage.filesystem import drop_cached, finish_writeback, start_writeback

WINDOW_BYTES = 64 * MIB  # written bytes per file that may stay in the cache
DROP_FROM_BYTES = MIB  # smaller reads leave their pages: dropping them costs more than keeping them
_NO_CONTROL = (errno_module.ESPIPE, errno_module.EINVAL, errno_module.ENOSYS, errno_module.EOPNOTSUPP)


class WriteBehind:
    """What one buffered file has written lately."""

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self.window_bytes = window_bytes
        self._lock = threading.Lock()
        self._ranges: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self._works = True

    def after_write(self, fd: int, offset: int, n_bytes: int) -> None:
        """Call after each write. Raises OSError when writing the older pages back failed."""
        if not self._works:
            return
        try:
            self._works = start_writeback(fd, offset, n_bytes)
        except OSError as error:
            if error.errno not in _NO_CONTROL:
                raise
            self._works = False  # no page cache control on this filesystem
        if not self._works:
            return
        with self._lock:
            self._ranges.append((offset, n_bytes))
            self._bytes += n_bytes
            old = []
            while self._bytes > self.window_bytes and len(self._ranges) > 1:
                old.append(self._ranges.popleft())
                self._bytes -= old[-1][1]
        for old_offset, old_bytes in old:
            finish_writeback(fd, old_offset, old_bytes)
            drop_cached(fd, old_offset, old_bytes)

    def after_read(self, fd: int, offset: int, n_bytes: int) -> None:
        """Call after each read."""
        if n_bytes >= DROP_FROM_BYTES:
            drop_cached(fd, offset, n_bytes)
