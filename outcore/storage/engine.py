"""Protocol of a storage engine, and `open_engine`, which picks one and says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from outcore.storage.block_file import BlockFile
from outcore.storage.engines import KvikioEngine, PosixEngine
from outcore.storage.engines.worker import STALL_S
from outcore.storage.errors import Transfer


@runtime_checkable
class StorageEngine(Protocol):
    """Moves bytes between memory and `BlockFile`s, many requests at a time.

    `submit_*` return at once. The buffer belongs to the engine until the transfer is done. Lower `priority` numbers go
    first, equal ones in order of submission. `close` finishes what was submitted, or with `cancel` what has begun;
    TimeoutError when nothing has moved for `stall_s`."""

    @property
    def name(self) -> str: ...

    def submit_read(self, file: BlockFile, offset: int, buffer: Any, *, priority: int = 0) -> Transfer: ...

    def submit_write(self, file: BlockFile, offset: int, buffer: Any, *, priority: int = 0) -> Transfer: ...

    def close(self, *, cancel: bool = False, stall_s: float = STALL_S) -> None: ...


@dataclass(frozen=True)
class DriveAccess:
    """Choice of a storage engine, and its settings."""

    engine: str = "auto"
    num_threads: int = 16
    """Threads of the engine. A drive that reads and writes at the same time wants more requests under way."""
    block_bytes: int = 8 << 20
    """Moved at a time by a thread."""
    path: Literal["staged", "kvikio", "gds"] = "staged"
    """Way of parameters to the GPU: through pinned slots, or read by kvikio into its memory (gds: past the CPU, an
    error where that does not work). The last two open kvikio whatever `engine` says."""

    @property
    def is_direct(self) -> bool:
        """True when device memory is read without slots."""
        return self.path != "staged"

    def open(self) -> StorageEngine:
        """Open as `open_engine` does."""
        if self.engine == "kvikio" or self.is_direct:
            gds = self.path == "gds"
            return open_engine("kvikio", num_threads=self.num_threads, task_bytes=self.block_bytes, gds=gds)
        return open_engine(self.engine, num_threads=self.num_threads, block_bytes=self.block_bytes)


DRIVE_ACCESS = DriveAccess()


def open_engine(name: str = "auto", **settings: Any) -> StorageEngine:
    """An engine by name: "posix", "kvikio", or "auto".

    "auto" takes posix: it moves what fio moves, needs no package and no GPU, and
    reads straight into pinned memory. kvikio is for a proven direct path to device memory, or where a measurement
    favours it.

    `settings` go to the engine's constructor. Raises ValueError for an unknown name and RuntimeError, with the reason,
    for an engine that this machine cannot run."""
    if name in ("auto", "posix"):
        return PosixEngine(**settings)
    if name == "kvikio":
        return KvikioEngine(**settings)
    raise ValueError(f"unknown storage engine {name!r}: choose 'auto', 'posix' or 'kvikio'")
