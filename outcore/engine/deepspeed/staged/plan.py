"""What the staged engine is told: one frozen dataclass, made from the resolved configuration and checked at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outcore.engine.deepspeed.settings import ELEMENT_BYTES, BuiltConfig, ModelFacts, Precision, RunFacts
from outcore.engine.deepspeed.staged.choice import RAM_OVERHEAD_BYTES
from outcore.engine.deepspeed.staged.shares import CHUNK_NUMEL
from outcore.engine.deepspeed.swapping import partition_numel
from outcore.optim import default_num_threads, state_format
from outcore.optim.backend import BackendName
from outcore.units import GIB, MIB, format_gib, round_up

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PADDING_BYTES = 8192
"""Per tensor: pages that its homes do not fill, and DeepSpeed's padding of shares."""
RING_BYTES = GIB
RING_SLOTS = 24
"""As the streaming engine's: a drive needs many requests under way, in both directions."""
LEAST_SLOTS = 4
"""With fewer the drive would read, compute and write in turn."""
AHEAD_BYTES = 512 * MIB
"""Parameters read ahead of use: 0.1 s of a fast drive."""


@dataclass(frozen=True)
class StagedPlan:
    """ValueError for what cannot work. All sizes are of one rank."""

    states: str = "split"
    """Format of the optimizer states: fp32, split (bf16 only, the same numbers in 10 B instead of 12), or with 8-bit
    moments fp32_m8, split8."""
    dtype: torch.dtype = torch.bfloat16
    """Of parameters and gradients."""
    home_bytes: int = 0
    """Parameters and gradients that will live in RAM, as far as known before the model is made."""
    pin: bool = True
    """Pin the homes of parameters and gradients."""
    nvme_path: str | None = None
    """Folder for what does not live in RAM. None: everything does."""
    state_ram_bytes: int | None = None
    """RAM for optimizer states, the rest goes to the drive. None: all in RAM; 0: all on the drive."""
    param_store_bytes: int = 0
    """Room on the drive for parameters; 0: they never go there."""
    param_ram_bytes: int | None = None
    """RAM for parameters where they may go to the drive. None: all that the device's settings put there."""
    staging_bytes: int = 0
    """Pinned memory through which parameters from the drive flow; 0 without."""
    ahead_bytes: int = 0
    """Of it, for parameters read before they are needed."""
    ring_bytes: int = RING_BYTES
    ring_slots: int = RING_SLOTS
    """Memory through which states on the drive flow; taken only when there are any."""
    optimizer_threads: int | None = None
    """None: all cores but two."""
    optimizer_backend: BackendName = "auto"
    notes: tuple[str, ...] = ()
    """What was not taken as the user asked, a sentence each."""

    def __post_init__(self) -> None:
        state_format(self.states)
        for name in ("home_bytes", "staging_bytes", "param_store_bytes", "ahead_bytes", "ring_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.nvme_path is None and (self.param_store_bytes or self.state_ram_bytes is not None):
            raise ValueError("nvme_path is missing: parameters or states are to go to a drive")
        if self.param_store_bytes and not self.staging_bytes:
            raise ValueError("parameters on the drive need staging_bytes to flow through")


def make_plan(built: BuiltConfig, model: ModelFacts, run: RunFacts) -> StagedPlan:
    """From a resolved configuration (`build_config(..., staged=True)`) and the facts of the run."""
    zero, offload = built.config["zero_optimization"], built.offload
    element_bytes = ELEMENT_BYTES[_precision(built)]
    trainable = partition_numel(model.trainable, run.world_size)
    whole = partition_numel(model.total_params, run.world_size)
    padding_bytes = max(1, model.num_tensors) * PADDING_BYTES
    grad_bytes = trainable * element_bytes
    param_bytes = (trainable if offload.params == "none" else whole) * element_bytes + padding_bytes
    params_on_nvme, states_on_nvme = offload.params == "nvme", offload.optimizer == "nvme"
    budget_bytes = offload.ram_budget_bytes if states_on_nvme or params_on_nvme else None
    store_bytes = staging_bytes = ahead_bytes = 0
    param_ram_bytes: int | None = None
    largest_bytes = round_up(partition_numel(model.largest_weight_numel, run.world_size) * element_bytes, 4096)
    if params_on_nvme:
        # a tied weight is made before it is tied, and has a place of its own until then
        store_bytes = round_up(param_bytes + 2 * largest_bytes, 4096)
        staging_bytes, ahead_bytes = _param_staging(zero, built, run, param_bytes, largest_bytes, element_bytes)
        param_ram_bytes = int(zero["offload_param"].get("max_in_cpu", 0)) * element_bytes
    allowed_bytes = int(built.config["outcore"]["staging_bytes"]) // run.local_ranks
    chunk_numel = min(CHUNK_NUMEL, partition_numel(model.largest_weight_numel, run.world_size))
    least_bytes = LEAST_SLOTS * ring_slot_bytes(offload.states, element_bytes, chunk_numel)
    ring_bytes = max(least_bytes, min(RING_BYTES, allowed_bytes))
    notes = []
    if (states_on_nvme or params_on_nvme) and allowed_bytes < ring_bytes + staging_bytes:
        notes.append(
            f"outcore.staging_bytes of {format_gib(allowed_bytes)} per process is raised to "
            f"{format_gib(ring_bytes + staging_bytes)}: {LEAST_SLOTS} chunks of states and the largest weight three "
            "times are the least that flows"
        )
    state_ram_bytes: int | None = 0 if states_on_nvme else None
    if budget_bytes is not None:
        left_bytes = budget_bytes - RAM_OVERHEAD_BYTES - grad_bytes - staging_bytes - ring_bytes
        if params_on_nvme:
            param_ram_bytes = min(param_bytes, max(0, left_bytes))
        left_bytes -= param_ram_bytes if param_ram_bytes is not None else param_bytes
        if states_on_nvme:
            state_ram_bytes = max(0, left_bytes)
    in_ram_bytes = param_bytes if param_ram_bytes is None else min(param_bytes, param_ram_bytes + padding_bytes)
    return StagedPlan(
        states=offload.states,
        dtype=DTYPES[_precision(built)],
        home_bytes=in_ram_bytes + grad_bytes,
        pin=bool(zero["offload_optimizer"].get("pin_memory", True)),
        nvme_path=offload.nvme_path,
        state_ram_bytes=state_ram_bytes,
        param_store_bytes=store_bytes,
        param_ram_bytes=param_ram_bytes,
        staging_bytes=staging_bytes,
        ahead_bytes=ahead_bytes,
        ring_bytes=ring_bytes,
        optimizer_threads=max(1, default_num_threads() // run.local_ranks),
        notes=tuple(notes),
    )


def ring_slot_bytes(states: str, element_bytes: int, chunk_numel: int = CHUNK_NUMEL) -> int:
    """Memory that the largest chunk takes in the ring, states and parameters."""
    return state_format(states).chunk_bytes(chunk_numel) + round_up(chunk_numel * element_bytes, 4096)


def _param_staging(
    zero: dict, built: BuiltConfig, run: RunFacts, param_bytes: int, largest_bytes: int, element_bytes: int
) -> tuple[int, int]:
    """Pinned bytes for parameters from the drive, and how many of them for reading ahead.

    DeepSpeed may hold `max_live_parameters` on the device and fetch a prefetch bucket more; each keeps its staging
    memory until it is released. At least three of the largest: one in use, one on its way, one ahead.
    """
    live_numel = int(zero["stage3_max_live_parameters"]) + int(zero["stage3_prefetch_bucket_size"])
    live_bytes = live_numel * element_bytes // run.world_size
    ahead_bytes = max(largest_bytes, AHEAD_BYTES)
    wanted_bytes = min(live_bytes + ahead_bytes, param_bytes + largest_bytes)
    allowed_bytes = int(built.config["outcore"]["staging_bytes"]) // run.local_ranks
    return round_up(max(3 * largest_bytes, min(wanted_bytes, allowed_bytes)), 4096), ahead_bytes


def _precision(built: BuiltConfig) -> Precision:
    for name in ("bf16", "fp16"):
        if (built.config.get(name) or {}).get("enabled"):
            return name  # pyright: ignore[reportReturnType]
    return "fp32"
