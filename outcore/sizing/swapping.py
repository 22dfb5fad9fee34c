"""Sizes that the DeepSpeed engine chooses or meets: buckets, tiles, shares of weights, bytes on the drive.

A weight that persists on the GPU must not live on NVMe: DeepSpeed reads all of those at once after a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.common.quantities import ELEMENT_BYTES, GB

SUB_GROUP_NUMEL = 100_000_000
"""Optimizer tile in RAM: 400 MB of fp32 per state."""


@dataclass(frozen=True)
class WeightCounts:
    """Counts of a model from which sizes follow. All counts are of the whole model, not of one rank."""

    total_params: int
    """Parameters, trainable or not; tied ones once."""
    largest_weight_numel: int
    """Elements of the largest single parameter tensor (usually the embedding)."""
    num_tensors: int = 0
    """Number of parameter tensors; 0 if unknown."""
    hidden_size: int | None = None
    """Width of the model."""
    trainable_params: int | None = None
    """Trainable parameters. None: all of them."""
    tied_numels: tuple[int, ...] = ()
    """Elements of each weight that is made and then tied away: ZeRO-3 gives it a share of its own until then."""

    def __post_init__(self) -> None:
        check_positive_int("total_params", self.total_params)
        check_positive_int("largest_weight_numel", self.largest_weight_numel)
        if self.largest_weight_numel > self.total_params:
            raise ValueError(
                f"largest_weight_numel {self.largest_weight_numel} exceeds total_params {self.total_params}"
            )
        if self.trainable_params is not None and not 0 < self.trainable_params <= self.total_params:
            raise ValueError(
                f"trainable_params must be between 1 and total_params ({self.total_params}), "
                f"got {self.trainable_params}: a model without trainable parameters cannot be trained."
            )

    @property
    def trainable(self) -> int:
        """Number of trainable parameters."""
        return self.total_params if self.trainable_params is None else self.trainable_params


def partition_numel(numel: int, world_size: int) -> int:
    """Elements of one rank's share of a weight, padding included."""
    return -(-numel // world_size)


def persistence_cap_numel(precision: Precision, world_size: int, block_size: int) -> int:
    """Largest weight that may persist on the GPU: one whose share stays below what DeepSpeed swaps."""
    swappable_share = -(-max(MIN_AIO_BYTES, block_size) // ELEMENT_BYTES[precision])
    return (swappable_share - 1) * world_size


def nvme_bytes(
    model: WeightCounts, precision: Precision, optimizer: bool, params: bool, optimizer_bytes_per_param: float
) -> int:
    """Bytes on the drive for the whole model: states of trainable parameters, and parameters with 2 (fp32: 4) B each,
    those of weights that are made before they are tied included."""
    total = 0
    if optimizer:
        total += int(model.trainable * optimizer_bytes_per_param)
    if params:
        total += (model.total_params + sum(model.tied_numels)) * ELEMENT_BYTES[precision]
    return total


def check_positive_int(name: str, value: object) -> None:
    """ValueError, with the name under which the user gave it."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} must be a whole number above 0, got {value!r}.")


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
