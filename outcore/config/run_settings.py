"""`RunSettings`: what engines, planner and the run's header are told; every value settled, with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from outcore.common.quantities import ELEMENT_BYTES
from outcore.config.deepspeed_file import DeepSpeedFile
from outcore.sizing.streaming import NUM_SLOTS

Device = Literal["none", "cpu", "nvme"]
Precision = Literal["bf16", "fp16", "fp32"]

DEFAULTS: dict[str, Any] = {
    "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "engine": "auto", "write_combined": "auto", "activations": "auto", "grad_accum_dtype": None,
    "lane_slots": NUM_SLOTS, "storage_engine": "auto", "storage_threads": 16, "transfer_path": "staged",
}  # fmt: skip
"""Fields that nothing but flag, YAML and file decide -> the default."""
LOSS_SCALING = {"initial_scale_power": 16, "loss_scale_window": 1000, "loss_scale_hysteresis": 2, "min_loss_scale": 1.0}
AS_SAID = ("optimizer", "seed", "matmul", "compile", "tiling", "tile_bytes", "nvme_checksums")
"""Fields that the file cannot give."""


@dataclass(frozen=True)
class Offload:
    """Homes that the user asks for, before RAM and drive were looked at."""

    optimizer: Device
    """Home of the optimizer states; none: the GPU (streaming: RAM)."""
    params: Device
    """Home of the parameters."""
    optimizer_may_spill: bool
    """Whether optimizer states may go to the drive although nobody said nvme."""
    params_may_spill: bool
    gradients_on_nvme: bool
    """Gradients on the drive as well, with DeepSpeed's engine."""
    residency: Literal["auto", "ram", "nvme"]
    everything: bool
    """All that can live on the drive goes there, not only what RAM does not hold."""
    nvme_path: str | None
    """The folder as the user wrote it; None: no drive is named."""
    path_is_asked: bool = field(compare=False)
    """Whether the folder was named by a flag."""
    strict: bool
    """Whether a drive that cannot be used is an error."""
    ram_budget_gib: float | None
    """RAM for parameters, gradients and states. None: what is available."""
    engine: Literal["staged", "stock"]
    """Engine that moves offloaded data under DeepSpeed."""
    pin_memory: bool
    pin_is_asked: bool = field(compare=False)
    """Whether `pin_memory` was said for everything, or each block of the file keeps its own."""
    max_in_cpu_numel: int
    """Parameters per rank that DeepSpeed keeps in RAM where they may go to the drive."""
    aio_block_size: int
    aio_queue_depth: int


@dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling; fp16 only."""

    initial_power: int
    window: int
    hysteresis: int
    minimum: float


@dataclass(frozen=True)
class RunSettings:
    """A run's settings for its engine and its planner."""

    precision: Precision
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    ranks_per_host: int
    optimizer: Literal["adamw", "muon"]
    learning_rate: float
    weight_decay: float
    decay_all: bool
    """Whether norms and biases decay, too."""
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    """0: no clipping."""
    activation_checkpointing: bool
    seed: int
    engine: Literal["auto", "stream", "deepspeed"]
    zero_stage: str
    """none, zero1, zero2, zero3 or infinity."""
    state_format: str
    """Format of offloaded optimizer states."""
    offload: Offload
    staging_bytes: int
    write_combined: Literal["auto", "on", "off"]
    storage_engine: Literal["auto", "posix", "kvikio"]
    storage_threads: int
    transfer_path: Literal["staged", "kvikio", "gds"]
    storage_block_bytes: int
    lane_slots: int
    lane_slot_bytes: int
    activations: Literal["auto", "device", "ram", "nvme"]
    matmul: Literal["same", "float8_tensorwise", "float8_rowwise", "fp16_accumulation"]
    compile: Literal["auto", "on", "off"]
    tiling: Literal["auto", "on", "off", "tokens"]
    tile_bytes: int | None
    resident_bytes: int | None
    """Idle GPU memory for layers that stay there, at most. None: the engine's default."""
    ahead_bytes: int | None
    """RAM for states of updates ahead of the global norm, at most. None: half of what is idle beside a GPU."""
    nvme_checksums: Literal["auto", "on", "off", "sampled"]
    packed_attention: Literal["auto", "masks"]
    grad_accum_dtype: Precision | None
    loss_scaling: LossScaling
    cut_is_open: bool = field(default=False, compare=False)
    """Whether the rows of a step may be cut into other micro-batches than the two numbers say."""
    file: DeepSpeedFile = field(default_factory=DeepSpeedFile, compare=False)
    """deepspeed_config.json: what of it only DeepSpeed reads passes through."""
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Field -> where its value comes from, or why it was chosen."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Values that were overruled, a line each."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """Settings that have no effect or were changed, a line each; must be seen."""

    @property
    def train_batch_size(self) -> int:
        """Rows of an optimizer step, of all ranks."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    def cut(self, micro_batch: int, why: str) -> RunSettings:
        """Split a step's rows into micro-batches of this size."""
        rows = self.per_device_train_batch_size * self.gradient_accumulation_steps
        assert rows % micro_batch == 0
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        numbers = dict(zip(names, (micro_batch, rows // micro_batch), strict=True))
        return replace(self, **numbers, cut_is_open=False, reasons={**self.reasons, **dict.fromkeys(names, why)})

    @property
    def element_bytes(self) -> int:
        """Bytes of a parameter as it is computed with."""
        return ELEMENT_BYTES[self.precision]

    def words(self) -> list[str]:
        """A line per setting with its reason."""
        owners = {name: self if hasattr(self, name) else self.offload for name in self.reasons}
        return [f"{n} = {getattr(of, n)}: {self.reasons[n]}" for n, of in owners.items() if hasattr(of, n)]
