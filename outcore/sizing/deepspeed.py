"""Sizes that the DeepSpeed engine chooses or meets, which the planner counts with."""

from typing import Literal

from outcore.common.quantities import GB

Device = Literal["none", "cpu", "nvme"]
Precision = Literal["bf16", "fp16", "fp32"]
MIN_AIO_BYTES = 1 << 20
"""DeepSpeed keeps a tensor below this size in RAM (deepspeed/runtime/swap_tensor/utils.py)."""
MAX_IN_CPU_BYTES = GB
"""Parameters that stay in RAM where they may go to the drive: the default of --max_in_cpu_gb."""
BUCKET_NUMEL = 50_000_000
"""100 MB of GPU memory per 16-bit bucket; larger gains nothing over one host's links."""
LIVE_NUMEL = 500_000_000
"""1 GB of 16-bit weights kept on the GPU between uses."""
RAM_BYTES_PER_PARAM, RAM_OVERHEAD_BYTES = 24, int(3.9 * GB)
"""Stock DeepSpeed with everything in RAM (16 would do), and what it takes beside. Measured, resident: 32.6 GB at 1.21 B
parameters, 71 GB at 2.83 B, and 33.8-34.1 GB with llama-1b: the line gives
32.9, 71.8 and 33.6 GB."""
NVME_RAM_BYTES_PER_PARAM = 6
"""RAM with the optimizer (or all) on NVMe, swap buffers not counted: 16-bit parameters and gradients and a copy of the
gradients while they are written. llama-1b, measured with everything on NVMe: 20.6 GB resident."""
