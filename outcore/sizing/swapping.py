"""Sizes that the DeepSpeed engine chooses or meets, and buffers of DeepSpeed 0.19.8's NVMe swappers: how many, how
large, so that no step runs out of them.

What the sizes follow from (deepspeed/runtime/swap_tensor, runtime/zero/partitioned_param_coordinator.py, stage3.py):

- Optimizer. One sub-group in use holds four buffers (fp32 master, two moments, gradient). Reading the next one ahead
  (`pipeline_read`) and writing the previous one behind (`pipeline_write`) hold four each: one buffer less than 12, 8
  or 4 fails. Every buffer has the size of the largest sub-group, so the sub-groups are made one weight each
  (`sub_group_size` 1): the smallest buffers there can be. That also keeps every gradient at offset 0 of its buffer. At
  an offset that is no multiple of 512 bytes DeepSpeed hands the kernel unaligned memory, the read fails, and nothing
  checks it: a model of width 516 trained with wrong gradients, silently, at `sub_group_size` 1e8 and exactly at 1.
- Parameters. A weight keeps its buffer from the read until its module released it. `stage3_max_reuse_distance` 0
  releases at once (with 1e9 and 5 buffers: "Not enough buffers 0 for swapping 1"). `stage3_max_live_parameters` 0 stops
  the gather-ahead; with it, the read-ahead takes one weight twice when its forward and backward use lie close together
  ("param 21 already assigned swap buffer id 33", with any number of buffers). The read-ahead of one weight remains.
- A weight that persists on the GPU must not live on NVMe: all of those are read at once after a step. Nor may
  `stage3_module_granularity_threshold` group modules: the group is read at once.
All of this was tried with a small model on the CPU accelerator; tests/engine/deepspeed/test_config_training.py repeats
the good half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.common.quantities import ELEMENT_BYTES, GB, round_up

SUB_GROUP_NUMEL = 100_000_000
"""Optimizer tile in RAM: 400 MB of fp32 per state."""
BUFFERS_PER_SUB_GROUP = 4
"""fp32 master, two moments, gradient."""
OPTIMIZER_BUFFERS = tuple(BUFFERS_PER_SUB_GROUP * groups for groups in (3, 2, 1))
"""Buffers for the sub-group in use, with one read ahead and one written behind; without the latter; alone."""
TENSORS_PER_MODULE = 2
"""Parameters of at least 1 MiB that one module of a dense model owns, at most: weight and bias."""
ALIGNED_BYTES = 1024
"""Swap sizes are multiples of this times intra_op_parallelism (AIO_ALIGNED_BYTES)."""
PARAM_BUFFERS_BASE = 4
"""Beside what one module reads at once: one weight read ahead, a tied one, one whose release autograd delays, one
spare."""


@dataclass(frozen=True)
class WeightCounts:
    """Counts of a model from which the sizes of swap buffers follow. All counts are of the whole model, not of one
    rank."""

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
    max_tensors_per_module: int = TENSORS_PER_MODULE
    """Most parameters of at least 1 MiB that one module owns directly, or a ZeRO-3 leaf module (mixture-of-experts
    block) owns in all: DeepSpeed reads that many at once, each into a swap buffer of its own."""
    tied_numels: tuple[int, ...] = ()
    """Elements of each weight that is made and then tied away: ZeRO-3 gives it a share of its own until then."""

    def __post_init__(self) -> None:
        check_positive_int("total_params", self.total_params)
        check_positive_int("largest_weight_numel", self.largest_weight_numel)
        check_positive_int("max_tensors_per_module", self.max_tensors_per_module)
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


@dataclass(frozen=True)
class OptimizerBuffers:
    """Swap buffers of the optimizer on NVMe."""

    buffer_count: int
    pipeline_read: bool
    pipeline_write: bool
    locked_bytes: int
    """Per rank."""


def min_optimizer_buffers(pipeline_read: bool, pipeline_write: bool) -> int:
    """Fewest buffers that cannot run out: four per sub-group in use, read ahead, written behind."""
    return BUFFERS_PER_SUB_GROUP * (1 + int(pipeline_read) + int(pipeline_write))


def partition_numel(numel: int, world_size: int) -> int:
    """Elements of one rank's share of a weight, padding included."""
    return -(-numel // world_size)


def size_optimizer_buffers(
    model: WeightCounts, world_size: int, local_ranks: int, intra_op_parallelism: int, budget_bytes: int
) -> OptimizerBuffers:
    """Pipelined both ways when that fits the budget of the host, else read ahead only, else not at all."""
    share_numel = round_up(
        partition_numel(model.largest_weight_numel, world_size), ALIGNED_BYTES * intra_op_parallelism
    )
    buffer_bytes = share_numel * ELEMENT_BYTES["fp32"]
    for read, write in ((True, True), (True, False), (False, False)):
        count = min_optimizer_buffers(read, write)
        if count * buffer_bytes * local_ranks <= budget_bytes or not read:
            return OptimizerBuffers(count, read, write, count * buffer_bytes)
    raise AssertionError("the last choice always applies")


def param_buffer_numel(model: WeightCounts, world_size: int, precision: Precision, intra_op_parallelism: int) -> int:
    """Elements one parameter swap buffer needs: the largest share, aligned as DeepSpeed aligns it."""
    alignment_numel = ALIGNED_BYTES * intra_op_parallelism // ELEMENT_BYTES[precision]
    return round_up(partition_numel(model.largest_weight_numel, world_size), alignment_numel)


def min_param_buffers(model: WeightCounts) -> int:
    """Fewest parameter buffers that cannot run out under the settings in this module's docstring."""
    return model.max_tensors_per_module + PARAM_BUFFERS_BASE


def persistence_cap_numel(precision: Precision, world_size: int, block_size: int) -> int:
    """Largest weight that may persist on the GPU: one whose share stays below what DeepSpeed swaps."""
    swappable_share = -(-max(MIN_AIO_BYTES, block_size) // ELEMENT_BYTES[precision])
    return (swappable_share - 1) * world_size


def nvme_bytes(
    model: WeightCounts,
    precision: Precision,
    optimizer: bool,
    params: bool,
    optimizer_bytes_per_param: float = 4 * ELEMENT_BYTES["fp32"],
) -> int:
    """Bytes on the drive for the whole model.

    Optimizer: with stock DeepSpeed fp32 master, two fp32 moments and the fp32 gradients it parks there, 16 B per
    trainable parameter. Parameters: their 2 (fp32: 4) B, also of weights that are made before they are tied."""
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
NVME_RAM_BYTES_PER_PARAM = 6
"""RAM with the optimizer (or all) on NVMe, swap buffers not counted: 16-bit parameters and gradients and a copy of the
gradients while they are written. llama-1b, measured with everything on NVMe: 20.6 GB resident."""
