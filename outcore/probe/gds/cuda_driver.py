"""The few CUDA driver calls the probe needs, through ctypes: no torch, no cupy, so a child process starts in a moment.

Reads device names and attribute 116 (GPUDirect RDMA supported: necessary for GPUDirect Storage, not sufficient; it is 1
on data-centre GPUs without any GDS set up), and allocates device memory that kvikio can read into, through the
`__cuda_array_interface__` protocol. Raises `CudaUnavailable` with the reason when there is no driver or no GPU."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

# cuda.h, enum CUdevice_attribute
ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
ATTRIBUTE_INTEGRATED = 18
ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116


class CudaUnavailable(RuntimeError):
    """There is no usable CUDA driver or device; the message says which and why."""


@dataclass(frozen=True)
class CudaDevice:
    """One GPU as the driver describes it."""

    name: str
    compute_capability: str
    gpu_direct_rdma_supported: bool | None
    """Attribute 116; None when this driver does not know the attribute."""
    integrated: bool = False


class DeviceBuffer:
    """Device memory with the `__cuda_array_interface__` protocol; freed by `close()`."""

    def __init__(self, driver: CudaDriver, size_bytes: int) -> None:
        self._driver = driver
        self.size_bytes = size_bytes
        pointer = ctypes.c_uint64(0)
        driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        self._pointer = int(pointer.value)
        driver.call("cuMemsetD8_v2", ctypes.c_uint64(self._pointer), ctypes.c_ubyte(0xA5), ctypes.c_size_t(size_bytes))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self._pointer, False),
            "strides": None,
            "version": 3,
        }

    def to_bytes(self) -> bytes:
        """The buffer's contents on the host; waits for the device first."""
        host = ctypes.create_string_buffer(self.size_bytes)
        self._driver.call("cuCtxSynchronize")
        self._driver.call("cuMemcpyDtoH_v2", host, ctypes.c_uint64(self._pointer), ctypes.c_size_t(self.size_bytes))
        return host.raw

    def close(self) -> None:
        if self._pointer:
            self._driver.call("cuMemFree_v2", ctypes.c_uint64(self._pointer))
            self._pointer = 0


class CudaDriver:
    """An initialised CUDA driver.

    `library` stands in for libcuda in tests. Raises `CudaUnavailable` when the library is missing, cuInit fails or
    there is no device."""

    def __init__(self, library: Any | None = None) -> None:
        self._library = library if library is not None else _load_library()
        self.call("cuInit", ctypes.c_uint(0))
        count = ctypes.c_int(0)
        self.call("cuDeviceGetCount", ctypes.byref(count))
        self.device_count = int(count.value)
        if self.device_count == 0:
            raise CudaUnavailable("the CUDA driver is installed but sees no GPU (CUDA_VISIBLE_DEVICES may hide it)")

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a driver function and raises `CudaUnavailable` with the driver's own words unless it returns 0."""
        result = int(getattr(self._library, function)(*arguments))
        if result != 0:
            raise CudaUnavailable(f"{function} failed: {self._error_text(result)}")

    def driver_version(self) -> str:
        """The CUDA version the driver supports, '13.0'."""
        version = ctypes.c_int(0)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def device(self, index: int) -> CudaDevice:
        """Describes device `index`."""
        handle = self._handle(index)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, ctypes.c_int(256), handle)
        major = self._attribute(ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)
        minor = self._attribute(ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)
        rdma = self._attribute(ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, handle)
        return CudaDevice(
            name=name.value.decode(errors="replace"),
            compute_capability=f"{major}.{minor}",
            gpu_direct_rdma_supported=None if rdma is None else rdma == 1,
            integrated=self._attribute(ATTRIBUTE_INTEGRATED, handle) == 1,
        )

    def make_current(self, index: int) -> None:
        """Makes the primary context of device `index` current on this thread (the one that kvikio and torch use)."""
        context = ctypes.c_void_p(0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle(index))
        self.call("cuCtxSetCurrent", context)

    def allocate(self, size_bytes: int) -> DeviceBuffer:
        """Device memory in the current context, filled with 0xA5 so that stale bytes cannot pass for a read."""
        return DeviceBuffer(self, size_bytes)

    def _handle(self, index: int) -> ctypes.c_int:
        handle = ctypes.c_int(0)
        self.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(index))
        return handle

    def _attribute(self, attribute: int, handle: ctypes.c_int) -> int | None:
        value = ctypes.c_int(0)
        result = int(self._library.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), handle))
        return int(value.value) if result == 0 else None

    def _error_text(self, result: int) -> str:
        text = ctypes.c_char_p()
        if int(self._library.cuGetErrorString(ctypes.c_int(result), ctypes.byref(text))) == 0 and text.value:
            return f"CUDA error {result}, {text.value.decode(errors='replace')}"
        return f"CUDA error {result}"


def _load_library() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        missing = "No such file" in str(error) or "could not find" in str(error).lower()
        why = "is not on this machine" if missing else f"cannot be loaded ({error})"
        raise CudaUnavailable(f"no NVIDIA driver: {name} {why}") from error
