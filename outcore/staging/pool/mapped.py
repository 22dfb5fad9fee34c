"""Page-locked RAM that a GPU's kernels read where it is, and small tensors that go to the GPU that way.

A copy, however small, waits in the GPU's copy engine behind those that are queued before it: behind three layers of
weights for 20 ms and more. A kernel that reads page-locked RAM waits for nobody.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch

from outcore.common.quantities import KIB
from outcore.staging.pool.cuda_runtime import load_libcudart

logger = logging.getLogger(__name__)

HALF_BYTES = 512 * KIB
ALIGNED_BYTES = 16


class SmallCopies:
    """Way of small tensors to one device. One thread; results are the current stream's.

    A ring of two halves: one is filled again once the stream has passed what was read from it. What exceeds a half
    goes by an ordinary copy, and so does everything where the GPU has no address for page-locked RAM.
    """

    def __init__(self, device: torch.device, half_bytes: int = HALF_BYTES) -> None:
        self.device, self._half_bytes = device, half_bytes
        self._view: torch.Tensor | None = None
        self._half, self._at = 0, 0
        self._passed: list[Any] = [None, None]
        if device.type == "cuda":
            self._host = torch.zeros(2 * half_bytes, dtype=torch.uint8, pin_memory=True)
            try:
                self._view = device_view(self._host, device)
            except MemoryError as error:
                logger.warning("small copies wait behind large ones: %s", error)

    def to(self, values: torch.Tensor) -> torch.Tensor:
        """Copy a CPU's tensor to the device; on a GPU it may be changed at once, on a CPU it may not."""
        if self._view is None or not 0 < values.nbytes <= self._half_bytes:
            return values.to(self.device)
        return (self._mapped(values, self._view) | 0).view(values.dtype).view(values.shape)

    def into(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a CPU's tensor into one of the device's that is as large and of its type."""
        if self._view is None or not 0 < values.nbytes <= self._half_bytes:
            target.copy_(values)
            return
        found = self._mapped(values, self._view)
        torch.bitwise_or(found, 0, out=target.view(-1).view(torch.uint8))

    def _mapped(self, values: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """Bytes of the values where the device reads them."""
        flat = values.contiguous().view(-1).view(torch.uint8)
        at = self._room(flat.numel())
        self._host[at : at + flat.numel()].copy_(flat)
        return view[at : at + flat.numel()]

    def _room(self, n_bytes: int) -> int:
        if self._at + n_bytes > self._half_bytes:
            self._passed[self._half] = torch.cuda.current_stream(self.device).record_event()
            self._half, self._at = 1 - self._half, 0
            if self._passed[self._half] is not None:
                self._passed[self._half].synchronize()
        at = self._half * self._half_bytes + self._at
        self._at += -(-n_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return at


class _Address:
    """A range of memory, told the way that torch takes from other libraries."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (n_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def device_view(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The bytes of a page-locked uint8 tensor as a tensor of the GPU's. Keep `host` alive. MemoryError where the GPU
    has no address for them: the runtime is asked before any kernel could touch a wrong one."""
    assert host.is_pinned() and host.dtype == torch.uint8 and host.is_contiguous()
    return torch.as_tensor(_Address(_device_address(host.data_ptr()), host.nbytes), device=device)


def _device_address(address: int) -> int:
    lib = load_libcudart()
    if lib is None:
        raise MemoryError("the CUDA runtime library is not to be found, so pages in RAM have no address on the GPU")
    found = ctypes.c_void_p()
    lib.cudaHostGetDevicePointer.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint]
    code = int(lib.cudaHostGetDevicePointer(ctypes.byref(found), ctypes.c_void_p(address), 0))
    if code or not found.value:
        lib.cudaGetLastError()  # or torch would report it at the next kernel
        raise MemoryError(f"the CUDA runtime gives pages in RAM no address on the GPU (error {code})")
    return int(found.value)
