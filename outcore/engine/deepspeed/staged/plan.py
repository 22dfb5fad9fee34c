"""Settings of the staged engine: one frozen dataclass, made from the resolved configuration and checked at once.

Whether outcore's staged offload can run what was asked for, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from outcore.common.classes import same_named
from outcore.common.quantities import ELEMENT_BYTES, format_gib, round_up
from outcore.config import Precision, RunSettings
from outcore.engine.deepspeed.offload import OffloadCosts
from outcore.engine.deepspeed.settings import ChosenOffload, Notes, RunFacts
from outcore.optim import BackendName, default_num_threads, state_format
from outcore.sizing.staged import (
    LEAST_SLOTS,
    RAM_OVERHEAD_BYTES,
    RING_BYTES,
    RING_SLOTS,
    StagedFacts,
    StagedSizes,
    staged_sizes,
)
from outcore.sizing.streaming import CHUNK_NUMEL
from outcore.sizing.swapping import WeightCounts, partition_numel
from outcore.storage import DRIVE_ACCESS, DriveAccess

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PADDING_BYTES = 8192
"""Per tensor: pages that its homes do not fill, and DeepSpeed's padding of shares."""


@dataclass(frozen=True)
class StagedPlan:
    """ValueError for what cannot work. All sizes are of one rank."""

    states: str = "split"
    """Format of the optimizer states: fp32, split (bf16 only, the same numbers in 10 B instead of 12), or with 8-bit
    moments fp32_m8, split8, fp24_m8."""
    dtype: torch.dtype = torch.bfloat16
    """Type of parameters and gradients."""
    home_bytes: int = 0
    """Parameters that will live in RAM, as far as known before the model is made."""
    grad_bytes: int = 0
    """Bytes of gradients that will live in RAM. Their memory is taken when the shares are known."""
    pin: bool = True
    """Pin the homes of parameters and gradients."""
    nvme_path: str | None = None
    """Folder for what does not live in RAM. None: everything does."""
    owns_nvme_path: bool = False
    """It is the run's own, made for it below the folder that the user named, and goes with it."""
    storage: DriveAccess = DRIVE_ACCESS
    nvme_checksums: Literal["auto", "on", "off", "sampled"] = "auto"
    """Verify what the drive gives back."""
    state_ram_bytes: int | None = None
    """RAM for optimizer states, the rest goes to the drive. None: all in RAM; 0: all on the drive."""
    param_store_bytes: int = 0
    """Room on the drive for parameters; 0: they never go there."""
    param_ram_bytes: int | None = None
    """RAM for parameters where they may go to the drive. None: all that the device's settings put there."""
    staging_bytes: int = 0
    """Pinned memory through which parameters from the drive flow; 0 without."""
    ahead_bytes: int = 0
    """Part of it for parameters read before they are needed."""
    grad_staging_bytes: int = 0
    """Pinned memory through which gradients flow to the drive and back; 0: they live in RAM."""
    ring_bytes: int = RING_BYTES
    ring_slots: int = RING_SLOTS
    """Memory through which states on the drive flow; taken only when there are any."""
    optimizer_threads: int | None = None
    """Threads of the optimizer; None: all cores but two."""
    optimizer_backend: BackendName = "auto"
    notes: tuple[str, ...] = ()
    """Requests that were not met as asked, a sentence each."""

    def __post_init__(self) -> None:
        state_format(self.states)
        for name in (
            "home_bytes", "grad_bytes", "staging_bytes", "param_store_bytes", "ahead_bytes", "ring_bytes",
            "grad_staging_bytes",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.nvme_path is None and (
            self.param_store_bytes or self.grad_staging_bytes or self.state_ram_bytes is not None
        ):
            raise ValueError("nvme_path is missing: parameters, gradients or states are to go to a drive")
        if self.param_store_bytes and not self.staging_bytes:
            raise ValueError("parameters on the drive need staging_bytes to flow through")


def sizes_of(settings: RunSettings, offload: ChosenOffload, model: WeightCounts, run: RunFacts) -> StagedSizes:
    """Make the sizes of one rank: what lives where, and what it flows through."""
    element_bytes, grad_element_bytes = settings.element_bytes, _gradient_element_bytes(settings)
    largest_numel = partition_numel(model.largest_weight_numel, run.world_size)
    max_in_cpu = settings.offload.max_in_cpu_numel if offload.params == "nvme" else 0
    return staged_sizes(
        StagedFacts(
            trainable_bytes=partition_numel(model.trainable, run.world_size) * element_bytes,
            gradient_bytes=partition_numel(model.trainable, run.world_size) * grad_element_bytes,
            whole_bytes=partition_numel(model.total_params, run.world_size) * element_bytes,
            largest_bytes=round_up(largest_numel * element_bytes, 4096),
            live_bytes=offload.live_numel * element_bytes // run.world_size,
            state_bytes=state_format(offload.states).chunk_bytes(partition_numel(model.trainable, run.world_size)),
            slot_bytes=ring_slot_bytes(
                offload.states,
                element_bytes if offload.params == "nvme" else 0,
                min(CHUNK_NUMEL, largest_numel),
                grad_element_bytes if offload.gradients_on_nvme else 0,
            ),
            optimizer=offload.optimizer,
            params=offload.params,
            allowed_bytes=_allowed_bytes(settings, run),
            ram_budget_bytes=offload.ram_budget_bytes,
            max_in_ram_bytes=max_in_cpu * element_bytes,
            tied_bytes=sum(
                round_up(partition_numel(numel, run.world_size) * element_bytes, 4096) for numel in model.tied_numels
            ),
            padding_bytes=_padding_bytes(model),
            gradients_on_nvme=offload.gradients_on_nvme,
            ram_bytes=None if run.ram_available_bytes is None else run.ram_available_bytes // run.local_ranks,
        )
    )


def drive_bytes(settings: RunSettings, offload: ChosenOffload, model: WeightCounts, run: RunFacts) -> int:
    """Bytes of one rank on the drive: the store of parameters (all pass through it when they are made), and states and
    gradients that RAM does not hold."""
    sizes = sizes_of(settings, offload, model, run)
    trainable = partition_numel(model.trainable, run.world_size)
    total_bytes = sizes.store_bytes
    if sizes.state_ram_bytes is not None:
        total_bytes += max(0, state_format(offload.states).chunk_bytes(trainable) - sizes.state_ram_bytes)
    if offload.gradients_on_nvme:
        total_bytes += trainable * _gradient_element_bytes(settings)
    return total_bytes


def make_plan(settings: RunSettings, offload: ChosenOffload, model: WeightCounts, run: RunFacts) -> StagedPlan:
    """From the settings, where things live (`build_config(..., staged=True)`) and the facts of the run."""
    sizes = sizes_of(settings, offload, model, run)
    allowed_bytes = _allowed_bytes(settings, run)
    needed_bytes = sizes.ring_bytes + sizes.staging_bytes + sizes.grad_staging_bytes
    notes = []
    if offload.uses_nvme and allowed_bytes < needed_bytes:
        notes.append(
            f"outcore.staging_bytes of {format_gib(allowed_bytes)} per process is raised to "
            f"{format_gib(needed_bytes)}: {LEAST_SLOTS} chunks of states and the largest weight three "
            "times are the least that flows"
        )
    in_ram_bytes = sizes.param_bytes
    if sizes.param_ram_bytes is not None:
        in_ram_bytes = min(sizes.param_bytes, sizes.param_ram_bytes + _padding_bytes(model))
    return StagedPlan(
        states=offload.states,
        nvme_path=offload.nvme_path,
        storage=offload.storage,
        nvme_checksums=offload.nvme_checksums,
        **same_named(StagedSizes, sizes, "param_bytes", "store_bytes"),
        dtype=DTYPES[settings.precision],
        home_bytes=in_ram_bytes,
        pin=_pins(settings),
        owns_nvme_path=offload.nvme_path is not None and bool(run.run_name),
        param_store_bytes=sizes.store_bytes,
        optimizer_threads=max(1, default_num_threads() // run.local_ranks),
        notes=tuple(notes),
    )


def ring_slot_bytes(
    states: str, element_bytes: int, chunk_numel: int = CHUNK_NUMEL, gradient_element_bytes: int = 0
) -> int:
    """Memory that the largest chunk takes in the ring: states, and parameters and gradient where they are on the drive
    (0 bytes where not)."""
    homes_bytes = round_up(chunk_numel * element_bytes, 4096) + round_up(chunk_numel * gradient_element_bytes, 4096)
    return state_format(states).chunk_bytes(chunk_numel) + homes_bytes


def _allowed_bytes(settings: RunSettings, run: RunFacts) -> int:
    return settings.staging_bytes // run.local_ranks


def _pins(settings: RunSettings) -> bool:
    """Whether homes of parameters and gradients are pinned: the flag, else what the optimizer's block says."""
    if settings.offload.pin_is_asked:
        return settings.offload.pin_memory
    return bool(settings.file.get("zero_optimization.offload_optimizer.pin_memory", settings.offload.pin_memory))


def _padding_bytes(model: WeightCounts) -> int:
    return max(1, model.num_tensors) * PADDING_BYTES


def _gradient_element_bytes(settings: RunSettings) -> int:
    """Bytes an element of the type in which gradients are summed."""
    return ELEMENT_BYTES[settings.grad_accum_dtype or settings.precision]


_SAMPLE_NUMEL = 1 << 22


def can_stage(settings: RunSettings, notes: Notes) -> bool:
    """False, with a note naming the key, where only DeepSpeed's own offload does what the file asks for."""
    why = _only_stock(settings)
    if why is not None:
        notes.warn(f"outcore.offload = stock: {why}. Remove it to have states moved by outcore instead of DeepSpeed.")
    return why is None


def _only_stock(settings: RunSettings) -> str | None:
    file = settings.file
    if str(file.get("optimizer.type", "AdamW")).lower() == "adam" and file.get("optimizer.params.adam_w_mode") is False:
        return "optimizer.params.adam_w_mode false (Adam with L2 regularisation) is DeepSpeed's only"
    for key in (
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
        "fp16.fp16_master_weights_and_grads",
    ):
        if file.get(key):
            return f"{key} is DeepSpeed's only (outcore.state_format split8 is smaller)"
    if file.get("optimizer.params.fp32_optimizer_states") is False:
        return (
            "optimizer.params.fp32_optimizer_states false is DeepSpeed's only (outcore.state_format split8 is smaller)"
        )
    zero = "zero_optimization"
    if file.get(f"{zero}.offload_optimizer.ratio", 1.0) != 1.0:
        return f"{zero}.offload_optimizer.ratio (part of the optimizer on the GPU) is DeepSpeed's only"
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if file.get(f"{zero}.{key}"):
            return f"{zero}.{key} is DeepSpeed's only"
    if file.get(f"{zero}.zero_hpz_partition_size", 1) > 1:
        return f"{zero}.zero_hpz_partition_size is DeepSpeed's only"
    return None


def staged_costs(states: str, settings: RunSettings, gradients_on_nvme: bool = False) -> OffloadCosts:
    """Bytes per parameter: 16-bit parameter and gradient, and the states of the format. Gradients go to the drive only
    beside states."""
    state_bytes = state_format(states).chunk_bytes(_SAMPLE_NUMEL) / _SAMPLE_NUMEL
    one = float(settings.element_bytes)
    on_drive = one if gradients_on_nvme else 0.0
    return OffloadCosts(2 * one + state_bytes, RAM_OVERHEAD_BYTES, 2 * one - on_drive, state_bytes + on_drive)
