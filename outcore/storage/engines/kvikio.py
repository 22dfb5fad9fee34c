"""`KvikioEngine`: NVIDIA's kvikio moves the bytes, into host memory or straight into device memory.

Algorithm: each worker hands a request to kvikio, which cuts it into tasks for its own C++ threads (no GIL) and answers
with a future; the worker waits for it and compares the byte count with what was asked. kvikio's defaults are slow (one
thread, page cache), so num_threads, task_size and direct I/O are always set. These settings belong to the process:
open one KvikioEngine at a time.

`gds=False` (default): kvikio's POSIX mode, device memory goes through its bounce buffers. `gds=True`: cuFile only, no
silent detour; to be asked for only where the probe has proved a direct path, a failure is a StorageError.

Fallback: without kvikio or a CUDA driver the constructor raises with the reason (kvikio itself would fail at the first
transfer only); `PosixEngine` always works. Pieces that are not whole 4 KiB blocks go through `BlockFile`, whose
read-modify-write is safe beside direct I/O where kvikio's page-cache writes are not."""

from __future__ import annotations

import ctypes
import importlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from outcore.common.quantities import MIB, round_up
from outcore.common.words import own_command
from outcore.storage.block_file import BlockFile
from outcore.storage.block_spans import address_of, host_bytes
from outcore.storage.engines.worker import STALL_S, Kind, PosixMover, WorkerEngine
from outcore.storage.errors import StorageError

BLOCK_BYTES = 4096  # cuFile's and kvikio's alignment for direct transfers


def load_driver() -> Any:
    """The CUDA driver library; raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def load_kvikio() -> Any:
    """The kvikio module, ready for I/O on this machine. Raises RuntimeError with the reason and the remedy."""
    try:
        kvikio = importlib.import_module("kvikio")
        importlib.import_module("kvikio.defaults")
    except Exception as error:  # its loader raises errors of its own where a library is missing
        raise RuntimeError(
            f"the kvikio engine needs the kvikio package ({error}): run `{own_command('setup')}` on a Linux machine "
            "with an NVIDIA GPU, or use the posix engine"
        ) from error
    try:
        driver = load_driver()
    except OSError as error:
        raise RuntimeError(
            f"the kvikio engine needs the NVIDIA driver, and libcuda.so.1 cannot be loaded ({error}): "
            "use the posix engine on this machine"
        ) from error
    status = driver.cuInit(0)
    if status != 0:
        raise RuntimeError(
            f"the kvikio engine needs a working GPU, and cuInit fails with CUDA error {status}: "
            "see `nvidia-smi`, or use the posix engine on this machine"
        )
    return kvikio


class KvikioMover(PosixMover):
    """Whole blocks through kvikio, the rest through the BlockFile."""

    def __init__(self, kvikio: Any, task_bytes: int) -> None:
        self._kvikio = kvikio
        self._task_bytes = task_bytes
        self._lock = threading.Lock()
        self._handles: weakref.WeakKeyDictionary[BlockFile, Any] = weakref.WeakKeyDictionary()

    def prepare(self, buffer: Any, *, writable: bool) -> tuple[Any, Callable[[], object] | None]:
        if not (isinstance(buffer, torch.Tensor) and buffer.device.type == "cuda"):
            return host_bytes(buffer, writable=writable), None
        if not buffer.is_contiguous():
            raise ValueError(f"the buffer of shape {tuple(buffer.shape)} is not contiguous: pass a contiguous tensor")
        # Kernels already queued may still write or read this memory: the transfer begins after them.
        event = torch.cuda.current_stream(buffer.device).record_event()
        return buffer.detach().reshape(-1).view(torch.uint8), event.synchronize

    def move(self, kind: Kind, file: BlockFile, offset: int, piece: Any) -> None:
        end = offset + piece.nbytes
        first, last = min(round_up(offset, BLOCK_BYTES), end), end - end % BLOCK_BYTES
        on_device = isinstance(piece, torch.Tensor)
        if not on_device and (first != offset or address_of(piece) % BLOCK_BYTES):
            first = last = end  # odd host memory: BlockFile bounces it
        last = max(first, last)
        if first > offset:
            self._move_edge(kind, file, offset, piece[: first - offset])
        if last > first:
            self._move_blocks(kind, file, first, piece[first - offset : last - offset])
        if end > last:
            self._move_edge(kind, file, last, piece[last - offset :])

    def _move_edge(self, kind: Kind, file: BlockFile, offset: int, part: Any) -> None:
        if not isinstance(part, torch.Tensor):
            super().move(kind, file, offset, part)
        elif kind == "read":
            host = torch.empty(part.nbytes, dtype=torch.uint8)
            file.read_into(host, offset)
            part.copy_(host)
            torch.cuda.current_stream(part.device).synchronize()
        else:
            file.write_from(part.cpu(), offset)

    def _move_blocks(self, kind: Kind, file: BlockFile, offset: int, part: Any) -> None:
        wanted = part.nbytes
        if offset + wanted > file.size_bytes:
            if kind == "write":  # kvikio would make the file longer behind the BlockFile's back
                reason = f"the file has {file.size_bytes} bytes; preallocate it before writing through kvikio"
                raise StorageError("write", path=file.path, offset=offset, wanted=wanted, got=0, reason=reason)
            got = max(0, file.size_bytes - offset)
            reason = f"the file ends at {file.size_bytes} bytes"
            raise StorageError("read", path=file.path, offset=offset, wanted=wanted, got=got, reason=reason)
        file.enter(kind)
        try:
            handle = self._handle(file)
            call = handle.pread if kind == "read" else handle.pwrite
            moved = call(part, wanted, offset, self._task_bytes).get()
        except (OSError, RuntimeError) as error:
            number = getattr(error, "errno", None)
            reason = f"kvikio: {error}"
            raise StorageError(
                kind, path=file.path, offset=offset, wanted=wanted, got=0, errno=number, reason=reason
            ) from error
        finally:
            file.leave()
        if moved != wanted:
            reason = "kvikio moved fewer bytes than asked: the file ends early or the drive failed"
            raise StorageError(kind, path=file.path, offset=offset, wanted=wanted, got=moved, reason=reason)

    def _handle(self, file: BlockFile) -> Any:
        with self._lock:
            handle = self._handles.get(file)
            if handle is None:
                handle = self._kvikio.CuFile(file.path, "r+" if file.writable else "r")
                self._handles[file] = handle
                file.add_close_callback(handle.close)
            return handle

    def close(self) -> None:
        with self._lock:
            handles = list(self._handles.values())
            self._handles.clear()
        for handle in handles:
            handle.close()


class KvikioEngine(WorkerEngine):
    """Moves host memory and CUDA tensors through kvikio.

    `num_threads`: kvikio's I/O threads. `task_bytes`: what one of them moves at a time. `num_requests`: requests given
    to kvikio at once. `gds`: cuFile instead of POSIX, only where it is proved to work. Raises RuntimeError with the
    reason where this machine cannot run it."""

    name = "kvikio"
    moves_device_memory = True

    def __init__(
        self,
        num_threads: int = 16,
        task_bytes: int = 8 * MIB,
        num_requests: int = 4,
        gds: bool = False,
        max_requests: int = 65536,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        if task_bytes < BLOCK_BYTES or task_bytes % BLOCK_BYTES:
            raise ValueError(f"task_bytes must be a positive multiple of {BLOCK_BYTES}, got {task_bytes}")
        kvikio = load_kvikio()
        self.gds = gds
        self.kvikio_threads = num_threads
        self.task_bytes = task_bytes
        settings = {
            "compat_mode": kvikio.CompatMode.OFF if gds else kvikio.CompatMode.ON,
            "num_threads": num_threads,
            "task_size": task_bytes,
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
        }
        if gds:
            settings["gds_threshold"] = 1  # small requests take no detour either
        self._settings = kvikio.defaults.set(settings)
        self._kvikio_mover = KvikioMover(kvikio, task_bytes)
        super().__init__(
            self._kvikio_mover,
            num_threads=num_requests,
            block_bytes=num_threads * task_bytes,
            max_requests=max_requests,
        )

    def close(self, *, cancel: bool = False, stall_s: float = STALL_S) -> None:
        """Close as `WorkerEngine.close` does; then close kvikio's file handles and restores its former settings."""
        super().close(cancel=cancel, stall_s=stall_s)
        settings, self._settings = self._settings, None
        self._kvikio_mover.close()
        if settings is not None:
            settings.__exit__(None, None, None)
