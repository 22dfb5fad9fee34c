"""A lease: exact bytes of staging memory with an owner's name on them, until released."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch

from outcore.common.quantities import format_gib


class LeaseError(RuntimeError):
    """A lease was used or released after it had been released."""


class Lease:
    """`n_bytes` of staging memory, 4 KiB-aligned, taken from a `PinnedPool` by `owner`.

    Tensors got from it stay valid memory after the release, but another owner may by then be writing there: drop them
    first, and release only when no transfer is under way. Usable as a context manager. Releasing is thread-safe."""

    def __init__(
        self, tensor: torch.Tensor, owner: str, write_combined: bool, is_pinned: bool, on_release: Callable[[], None]
    ) -> None:
        self.owner = owner
        self.n_bytes = tensor.numel()
        self.write_combined = write_combined
        """True when the memory really is write-combined: the CPU must not read it (about 2 GB/s)."""
        self.is_pinned = is_pinned
        self._tensor: torch.Tensor | None = tensor
        self._on_release = on_release
        self._lock = threading.Lock()

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes: 1-D uint8, exactly `n_bytes`. LeaseError after the release."""
        tensor = self._tensor
        if tensor is None:
            raise LeaseError(
                f"{self} was released and is used again: keep a lease until its last transfer and reader are done"
            )
        return tensor

    @property
    def is_released(self) -> bool:
        return self._tensor is None

    def view(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The first bytes as a contiguous tensor of `dtype` and `shape`; ValueError when they do not fit."""
        wanted_bytes = math.prod(shape) * dtype.itemsize
        if wanted_bytes > self.n_bytes:
            raise ValueError(
                f"{tuple(shape)} of {dtype} needs {wanted_bytes} bytes, {self} has {self.n_bytes}: lease more"
            )
        return self.tensor[:wanted_bytes].view(dtype).view(tuple(shape))

    def release(self) -> None:
        """Gives the bytes back to the pool. LeaseError when that has been done before."""
        with self._lock:
            if self._tensor is None:
                raise LeaseError(f"{self} is released for the second time: one owner, one release")
            self._tensor = None
        self._on_release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self.is_released:
            self.release()

    def __repr__(self) -> str:
        return f"the lease of {format_gib(self.n_bytes)} held by {self.owner!r}"
