"""Rates at which the device multiplies matrices and copies within its own memory: they bound a training step's
arithmetic.

Matrices as training has them: bf16 on a GPU (fp16 where it has no bf16 units), fp32 on a CPU, products accumulated in
fp32. The rate is that of the second half of the time, after the chip has left its boost clocks behind. Memory: a copy
far larger than any cache, read and written bytes counted. Cost: the time given, 0.4 GiB on a GPU, 0.3 GiB on a CPU."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from outcore.common.quantities import GB, MIB

GPU_WIDTH, CPU_WIDTH = 8192, 1024
"""Square matrices: large enough that the shape does not limit, small enough that the shortest time holds several."""
GPU_COPY_BYTES, CPU_COPY_BYTES = 256 * MIB, 128 * MIB


@dataclass(frozen=True)
class ComputeRates:
    """Rates of one device."""

    device: str
    dtype: str
    """'bf16', 'fp16' or 'fp32'."""
    matmul_tflops: float
    memory_gb_per_s: float
    """Read and written bytes of a copy within the device's memory."""
    elapsed_s: float


def measure_compute(device: torch.device, limit_s: float) -> ComputeRates:
    """Measure both rates, in about `limit_s` (at least one product and one copy)."""
    begin_s = time.perf_counter()
    dtype, name = compute_dtype(device)
    width = GPU_WIDTH if device.type == "cuda" else CPU_WIDTH
    a = torch.full((width, width), 0.5, dtype=dtype, device=device)
    product = torch.empty_like(a)
    torch.mm(a, a, out=product)
    _settle(device, limit_s * 0.4, lambda: torch.mm(a, a, out=product))
    seconds, count = _settle(device, limit_s * 0.4, lambda: torch.mm(a, a, out=product))
    if float(product[0, 0]) != 0.25 * width:
        raise RuntimeError(
            f"a matrix product on {device} gave {float(product[0, 0])} where {0.25 * width} is right: this device is "
            "not healthy"
        )
    n_bytes = GPU_COPY_BYTES if device.type == "cuda" else CPU_COPY_BYTES
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    copy_s, copies = _settle(device, limit_s * 0.2, lambda: target.copy_(source))
    return ComputeRates(
        str(device),
        name,
        count * 2 * width**3 / seconds / 1e12,
        copies * 2 * n_bytes / copy_s / GB,
        time.perf_counter() - begin_s,
    )


def compute_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """The type that training takes there, and its name."""
    if device.type != "cuda":
        return torch.float32, "fp32"
    has_bf16 = torch.cuda.get_device_capability(device)[0] >= 8
    return (torch.bfloat16, "bf16") if has_bf16 else (torch.float16, "fp16")


def _settle(device: torch.device, limit_s: float, work) -> tuple[float, int]:
    """(seconds, repeats) of `work`, in groups that double until one fills the time; the last group counts."""
    count = 1
    while True:
        _wait(device)
        begin_s = time.perf_counter()
        for _ in range(count):
            work()
        _wait(device)
        seconds = time.perf_counter() - begin_s
        if seconds >= limit_s / 3:
            return max(seconds, 1e-9), count
        count *= 2


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
