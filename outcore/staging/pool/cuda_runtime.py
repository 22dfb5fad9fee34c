"""The four CUDA runtime calls that pinned memory needs, through whatever is at hand.

Registering goes through `torch.cuda.cudart()`. Write-combined memory needs `cudaHostAlloc`, which torch does not offer:
cupy's runtime has it; where cupy is not installed it is called by ctypes in the libcudart that torch has loaded. Every
result is checked; the sticky "last error" is cleared after a refusal, because torch would otherwise report it at an
unrelated kernel launch."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

HOST_REGISTER_PORTABLE = 0x01  # cudaHostRegisterPortable: pinned for every device of the process
HOST_ALLOC_PORTABLE = 0x01  # cudaHostAllocPortable
HOST_ALLOC_WRITE_COMBINED = 0x04  # cudaHostAllocWriteCombined


class PinRefused(RuntimeError):
    """The CUDA runtime (or the operating system) did not give pinned memory; the message has its reason."""


def find_libcudart() -> Path | None:
    """The libcudart that is mapped into this process (Linux), None when there is none."""
    maps = Path("/proc/self/maps")
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcudart.so"):
            return Path(path)
    return None


def load_libcudart() -> ctypes.CDLL | None:
    """The mapped libcudart by ctypes (calls release the GIL), None when there is none."""
    path = find_libcudart()
    if path is None:
        return None
    lib = ctypes.CDLL(str(path))
    lib.cudaHostAlloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint]
    lib.cudaFreeHost.argtypes = [ctypes.c_void_p]
    lib.cudaGetErrorString.argtypes = [ctypes.c_int]
    lib.cudaGetErrorString.restype = ctypes.c_char_p
    return lib


class CudaRuntime:
    """Pinned-memory calls on one device; made once per pool. RuntimeError when there is no CUDA to start."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"pinned memory for {device} needs a CUDA GPU, and torch {torch.__version__} sees none: look at "
                "nvidia-smi and at torch.version.cuda, or use device='cpu' for plain staging memory"
            )
        torch.cuda.init()
        self.device = device
        self._cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # the primary context exists from here on
        self._lib = load_libcudart()
        self._of_cupy: set[int] = set()

    def register(self, address: int, n_bytes: int) -> None:
        """Pins `n_bytes` of mapped memory at `address` for DMA by every device; PinRefused with the reason."""
        with torch.cuda.device(self.device):
            code = int(self._cudart.cudaHostRegister(address, n_bytes, HOST_REGISTER_PORTABLE))
            if code:
                raise PinRefused(f"cudaHostRegister of {n_bytes} bytes: {self._explain(code)}")

    def unregister(self, address: int) -> None:
        """Undoes `register`; PinRefused when the address was not registered."""
        with torch.cuda.device(self.device):
            code = int(self._cudart.cudaHostUnregister(address))
            if code:
                raise PinRefused(f"cudaHostUnregister: {self._explain(code)}")

    def alloc_write_combined(self, n_bytes: int) -> int:
        """Address of `n_bytes` of write-combined pinned memory; PinRefused when refused or when no way to ask."""
        flags = HOST_ALLOC_PORTABLE | HOST_ALLOC_WRITE_COMBINED
        with torch.cuda.device(self.device):
            try:
                address = int(_cupy_runtime().hostAlloc(n_bytes, flags))
            except ImportError as error:
                if self._lib is None:
                    raise PinRefused(
                        "write-combined memory needs cupy or libcudart; no libcudart.so is mapped, cupy is missing "
                        f"({error}): install cupy-cuda12x or cupy-cuda13x to match torch's CUDA"
                    ) from error
            except Exception as error:  # cupy's CUDARuntimeError has no importable base without cupy
                raise PinRefused(f"cupy hostAlloc of {n_bytes} bytes, write-combined: {error}") from error
            else:
                self._of_cupy.add(address)
                return address
            pointer = ctypes.c_void_p()
            code = self._lib.cudaHostAlloc(ctypes.byref(pointer), n_bytes, flags)
            if code or not pointer.value:
                raise PinRefused(f"cudaHostAlloc of {n_bytes} bytes, write-combined: {self._explain(code)}")
            return pointer.value

    def free_write_combined(self, address: int) -> None:
        """Frees what `alloc_write_combined` returned."""
        with torch.cuda.device(self.device):
            if address in self._of_cupy:
                self._of_cupy.remove(address)
                _cupy_runtime().freeHost(address)
                return
            assert self._lib is not None, "it allocated this"
            code = self._lib.cudaFreeHost(address)
            if code:
                raise PinRefused(f"cudaFreeHost: {self._explain(code)}")

    def synchronize(self) -> None:
        """Waits until the device has finished everything queued (before pinned memory is taken away)."""
        torch.cuda.synchronize(self.device)

    def _explain(self, code: int) -> str:
        if self._lib is not None:
            text = self._lib.cudaGetErrorString(code)
            self._lib.cudaGetLastError()  # clears it, or the next kernel launch would be blamed
            return f"{text.decode() if text else 'unknown error'} (CUDA error {code})"
        return f"CUDA error {code}"


def _cupy_runtime() -> Any:
    import cupy  # type: ignore[import-not-found]

    return cupy.cuda.runtime
