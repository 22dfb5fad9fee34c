"""Host memory as the storage room sees it: a flat run of bytes with a known address.

`host_bytes` turns a contiguous CPU tensor (any dtype, pinned or not) or any object with the buffer protocol into a
1-D numpy `uint8` view without copying. `aligned_bytes` makes page-aligned memory that O_DIRECT accepts everywhere."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any, cast

import numpy as np
import torch

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20


def host_bytes(buffer: Any, *, writable: bool) -> np.ndarray:
    """A `uint8` view [n_bytes] of `buffer`'s own memory.

    Raises ValueError for a CUDA or non-contiguous tensor, and for read-only memory when `writable` is asked for.
    The view keeps the buffer alive; the caller must not resize it while a transfer runs."""
    if isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu":
            raise ValueError(
                f"the buffer is on {buffer.device}; this engine moves host memory only: "
                "stage it through outcore.staging, or use the kvikio engine"
            )
        if not buffer.is_contiguous():
            raise ValueError(f"the buffer of shape {tuple(buffer.shape)} is not contiguous: pass a contiguous tensor")
        return buffer.detach().reshape(-1).view(torch.uint8).numpy()
    if isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8 and buffer.ndim == 1 and buffer.flags.c_contiguous:
        flat = buffer
    else:
        try:
            view = memoryview(cast(Any, buffer))
            if not view.c_contiguous:
                raise ValueError("the buffer is not contiguous")
            flat = np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)
        except TypeError as error:
            raise ValueError(
                f"cannot move bytes of a {type(buffer).__name__}: "
                "need a CPU tensor or an object with the buffer protocol"
            ) from error
    if writable and flat.size and not flat.flags.writeable:
        raise ValueError("cannot read into this buffer: its memory is read-only (bytes, or a read-only view)")
    return flat


def address_of(view: np.ndarray) -> int:
    """The address of the view's first byte."""
    return view.__array_interface__["data"][0]


def aligned_bytes(n_bytes: int) -> np.ndarray:
    """Fresh zeroed memory [n_bytes], page-aligned, returned to the system when the array is dropped.

    From 2 MiB on it asks for huge pages: the kernel pins every page of an O_DIRECT request, 512 times fewer of them.
    Private, because Python's default (shared) is never backed by huge pages."""
    if n_bytes <= 0:
        return np.empty(0, dtype=np.uint8)
    if not hasattr(mmap, "MAP_PRIVATE"):
        return np.frombuffer(mmap.mmap(-1, n_bytes), dtype=np.uint8)[:n_bytes]
    slack_bytes = HUGE_PAGE_BYTES if n_bytes >= HUGE_PAGE_BYTES else 0
    memory = mmap.mmap(-1, n_bytes + slack_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if slack_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: ordinary ones do
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -address_of(whole) % HUGE_PAGE_BYTES if slack_bytes else 0
    return whole[start : start + n_bytes]


def copy_bytes(target: np.ndarray, source: np.ndarray) -> None:
    """memcpy of equal-length views; ctypes lets other threads run meanwhile, so bounced pieces stay parallel."""
    assert target.nbytes == source.nbytes
    ctypes.memmove(address_of(target), address_of(source), target.nbytes)
