"""Placement of the staged engine: one rule, for the run (`plan`) and for the planner. Pure.

RAM must hold the ring of states, the staging memory of parameters, and gradients unless they were sent to the drive;
of what a budget leaves, parameters take what they need before states do: on the drive both are read and written once by
an update, and parameters are read twice more by every micro-batch but the first.

The ring keeps chunks from one update to the next (`states/ring/schedule`), so memory for it is worth as much as memory
for states. Without a budget, where all states were sent to the drive, it takes a third of what flows through it: as far
as the user allows staging memory, and at most half of the RAM that the run leaves beside its reserve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.common.quantities import GIB, MIB, round_up
from outcore.sizing.streaming import RAM_RESERVE_BYTES
from outcore.sizing.swapping import Device

RAM_OVERHEAD_BYTES = 3 * GIB
"""Python, torch, CUDA and DeepSpeed themselves, per rank."""
RING_BYTES = GIB
"""Ring as the streaming engine's: a drive needs many requests under way, in both directions. Enough for that."""
RING_SHARE_OF_FLOW, RING_SHARE_OF_FREE_RAM = 3, 2
"""Beyond `RING_BYTES` the ring takes one byte in so many of what flows, and at most of the RAM that is left. What it
keeps, the drive need not move in forward and backward either, so more of it would let the drive idle there longer."""
RING_SLOTS = 1024
"""At most; its bytes decide."""
LEAST_SLOTS = 4
"""Least slots: with fewer the drive would read, compute and write in turn."""
AHEAD_BYTES = 512 * MIB
"""Parameters read ahead of use: 0.1 s of a fast drive."""
NORM_NUMEL = 1 << 24
"""Elements of a gradient that are on the GPU in fp64 at a time, for its norm: 128 MiB. DeepSpeed's 250 million take
2 GB, more than anything else that is there in a run with short micro-batches and a large vocabulary."""
MIN_BYTES = MIB
"""Smaller shares of parameters, and gradients of such, stay in RAM: a drive would answer them one by one."""
GRADIENT_SLOT_BYTES = 8 * MIB
GRADIENT_SLOTS = 8
"""Slots of each of the two lanes through which gradients on the drive flow."""
GRADIENT_STAGING_BYTES = 2 * GRADIENT_SLOTS * GRADIENT_SLOT_BYTES


@dataclass(frozen=True)
class StagedFacts:
    """Facts of one rank."""

    trainable_bytes: int
    """Bytes of the rank's share of the trainable parameters in their own type."""
    gradient_bytes: int
    """Bytes of gradients of these parameters, in the type in which they are summed."""
    whole_bytes: int
    """Bytes of the rank's share of all parameters."""
    largest_bytes: int
    """Bytes of the rank's share of the largest weight, in whole pages."""
    live_bytes: int
    """Parameters that DeepSpeed may hold on the device, prefetch included: the rank's share of them."""
    state_bytes: int
    """States of the optimizer, wherever they live."""
    slot_bytes: int
    """One chunk in the ring: states, and parameters and gradient where they may be on the drive."""
    optimizer: Device
    params: Device
    allowed_bytes: int
    """outcore.staging_bytes of the rank."""
    ram_budget_bytes: int | None = None
    max_in_ram_bytes: int = 0
    """Parameters kept in RAM though they may go to the drive, where no budget says (--max_in_cpu_gb)."""
    tied_bytes: int = 0
    """Bytes of the rank's share of the weights that are made and then tied away, in whole pages."""
    padding_bytes: int = 0
    """Padding of parameters: pages that their homes do not fill."""
    gradients_on_nvme: bool = False
    ram_bytes: int | None = None
    """RAM that the rank may take in all. None: not known, so the ring takes no more than it needs."""


@dataclass(frozen=True)
class StagedSizes:
    """Sizes of one rank."""

    param_bytes: int
    """Homes of parameters; with parameters on the GPU those of the trainable ones, which the optimizer writes."""
    grad_bytes: int
    """Bytes of gradients in RAM; 0 when they live on the drive."""
    grad_staging_bytes: int
    """Pinned memory through which gradients on the drive flow."""
    store_bytes: int
    """Room on the drive for parameters; 0: they never go there."""
    param_ram_bytes: int | None
    """Parameters kept in RAM; None: all."""
    state_ram_bytes: int | None
    """States kept in RAM; None: all; 0: every state lives on the drive."""
    staging_bytes: int
    ahead_bytes: int
    ring_bytes: int


def staged_sizes(facts: StagedFacts) -> StagedSizes:
    """Divide memory; see the module docstring."""
    params_on_nvme, states_on_nvme = facts.params == "nvme", facts.optimizer == "nvme"
    param_bytes = (facts.trainable_bytes if facts.params == "none" else facts.whole_bytes) + facts.padding_bytes
    store_bytes = staging_bytes = ahead_bytes = 0
    param_ram_bytes: int | None = None
    if params_on_nvme:
        store_bytes = round_up(param_bytes + facts.tied_bytes, 4096)  # every weight that is made has a place
        staging_bytes, ahead_bytes = _param_staging(facts, param_bytes)
        param_ram_bytes = facts.max_in_ram_bytes
    state_ram_bytes: int | None = 0 if states_on_nvme else None
    grad_bytes = 0 if facts.gradients_on_nvme else facts.gradient_bytes
    grad_staging_bytes = GRADIENT_STAGING_BYTES if facts.gradients_on_nvme else 0
    ring_bytes = min(RING_BYTES, facts.allowed_bytes)
    if states_on_nvme and facts.ram_bytes is not None and facts.ram_budget_bytes is None:
        taken_bytes = RAM_OVERHEAD_BYTES + RAM_RESERVE_BYTES + staging_bytes + grad_bytes + grad_staging_bytes
        taken_bytes += param_bytes if param_ram_bytes is None else param_ram_bytes
        free_bytes = (facts.ram_bytes - taken_bytes) // RING_SHARE_OF_FREE_RAM
        flow_bytes = facts.state_bytes + (facts.trainable_bytes if params_on_nvme else 0)
        flow_bytes += facts.gradient_bytes if facts.gradients_on_nvme else 0
        wanted_bytes = min(flow_bytes // RING_SHARE_OF_FLOW, free_bytes)
        wanted_bytes = min(wanted_bytes, facts.allowed_bytes - staging_bytes - grad_staging_bytes)
        ring_bytes = max(ring_bytes, wanted_bytes)
    ring_bytes = max(LEAST_SLOTS * facts.slot_bytes, ring_bytes)
    if facts.ram_budget_bytes is not None and (states_on_nvme or params_on_nvme):
        left_bytes = facts.ram_budget_bytes - RAM_OVERHEAD_BYTES - staging_bytes - ring_bytes
        left_bytes -= grad_bytes + grad_staging_bytes
        if params_on_nvme:
            param_ram_bytes = min(param_bytes, max(0, left_bytes))
        left_bytes -= param_ram_bytes if param_ram_bytes is not None else param_bytes
        if states_on_nvme:
            state_ram_bytes = max(0, left_bytes)
    return StagedSizes(
        param_bytes,
        grad_bytes,
        grad_staging_bytes,
        store_bytes,
        param_ram_bytes,
        state_ram_bytes,
        staging_bytes,
        ahead_bytes,
        ring_bytes,
    )


def leading_in_ram(sub_groups_bytes: Sequence[int], ram_bytes: int) -> int:
    """Count the sub-groups of trainable shares that have their parameters in RAM where these may go to the drive: the
    leading ones that `ram_bytes` holds."""
    left_bytes = ram_bytes
    for number, n_bytes in enumerate(sub_groups_bytes):
        left_bytes -= n_bytes
        if left_bytes < 0:
            return number
    return len(sub_groups_bytes)


def frozen_in_ram(shares_bytes: Sequence[int], left_bytes: int) -> list[bool]:
    """Choose the frozen shares that have their home in RAM where they may go to the drive: in the model's order, each
    that fits into the rest of `left_bytes`, which is the RAM for parameters less what lives there anyway: leading
    trainable sub-groups and all small shares."""
    stays = []
    for n_bytes in shares_bytes:
        stays.append(n_bytes <= left_bytes)
        left_bytes -= n_bytes * stays[-1]
    return stays


def _param_staging(facts: StagedFacts, param_bytes: int) -> tuple[int, int]:
    """Pinned bytes for parameters from the drive, and how many of them for reading ahead.

    DeepSpeed may hold `max_live_parameters` on the device and fetch a prefetch bucket more; each keeps its staging
    memory until it is released. At least three of the largest: one in use, one on its way, one ahead."""
    ahead_bytes = max(facts.largest_bytes, AHEAD_BYTES)
    wanted_bytes = min(facts.live_bytes + ahead_bytes, param_bytes + facts.largest_bytes)
    return round_up(max(3 * facts.largest_bytes, min(wanted_bytes, facts.allowed_bytes)), 4096), ahead_bytes
