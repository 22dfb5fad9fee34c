"""Buffers of DeepSpeed 0.19.8's NVMe swappers: how many, how large, so that no step runs out of them.

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
the good half.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.common.quantities import GIB, round_up
from outcore.engine.deepspeed.config.settings import ELEMENT_BYTES, MIN_AIO_BYTES, ModelFacts, Precision

SUB_GROUP_NUMEL = 100_000_000
"""Optimizer tile in RAM: 400 MB of fp32 per state."""
BUFFERS_PER_SUB_GROUP = 4
"""fp32 master, two moments, gradient."""
ALIGNED_BYTES = 1024
"""Swap sizes are multiples of this times intra_op_parallelism (AIO_ALIGNED_BYTES)."""
PARAM_BUFFERS_BASE = 4
"""Beside what one module reads at once: one weight read ahead, a tied one, one whose release autograd delays, one
spare."""
DEFAULT_SWAP_BUDGET_BYTES = 8 * GIB
"""Locked RAM the optimizer's swap buffers may take per host before pipelining is given up (outcore.staging_bytes)."""


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
    model: ModelFacts, world_size: int, local_ranks: int, intra_op_parallelism: int, budget_bytes: int
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


def param_buffer_numel(model: ModelFacts, world_size: int, precision: Precision, intra_op_parallelism: int) -> int:
    """Elements one parameter swap buffer needs: the largest share, aligned as DeepSpeed aligns it."""
    alignment_numel = ALIGNED_BYTES * intra_op_parallelism // ELEMENT_BYTES[precision]
    return round_up(partition_numel(model.largest_weight_numel, world_size), alignment_numel)


def min_param_buffers(model: ModelFacts) -> int:
    """Fewest parameter buffers that cannot run out under the settings in this module's docstring."""
    return model.max_tensors_per_module + PARAM_BUFFERS_BASE


def persistence_cap_numel(precision: Precision, world_size: int, block_size: int) -> int:
    """Largest weight that may persist on the GPU: one whose share stays below what DeepSpeed swaps."""
    swappable_share = -(-max(MIN_AIO_BYTES, block_size) // ELEMENT_BYTES[precision])
    return (swappable_share - 1) * world_size


def nvme_bytes(
    model: ModelFacts,
    precision: Precision,
    optimizer: bool,
    params: bool,
    optimizer_bytes_per_param: float = 4 * ELEMENT_BYTES["fp32"],
) -> int:
    """Bytes on the drive for the whole model.

    Optimizer: with stock DeepSpeed fp32 master, two fp32 moments and the fp32 gradients it parks there, 16 B per
    trainable parameter. Parameters: their 2 (fp32: 4) B, also of weights that are made before they are tied.
    """
    total = 0
    if optimizer:
        total += int(model.trainable * optimizer_bytes_per_param)
    if params:
        total += (model.total_params + sum(model.tied_numels)) * ELEMENT_BYTES[precision]
    return total
