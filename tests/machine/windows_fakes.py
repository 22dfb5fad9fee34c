"""Stand-in for a module of Windows."""

import fcntl
import os
import types

from outcore.common import os_layer


class FakeMsvcrt(types.ModuleType):
    """Its `locking`: one byte where the descriptor stands, mandatory, per descriptor, refused with EACCES."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self._flock = fcntl.flock  # stands for the byte: it, too, dies with the descriptor

    def locking(self, descriptor: int, how: int, count: int) -> None:
        assert count == 1 and os.lseek(descriptor, 0, os.SEEK_CUR) == os_layer.LOCKED_AT
        try:
            self._flock(descriptor, fcntl.LOCK_UN if how == self.LK_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(13, "Permission denied") from None
