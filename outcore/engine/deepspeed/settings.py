"""What the DeepSpeed configuration builder is told and what it gives back: frozen dataclasses.

`DeepSpeedSettings` are the user's offload flags, `RunFacts` describes the run (`WeightCounts` the model),
`BuiltConfig` is the resolved configuration with one note per decision. All checks of single values are here, so that a
wrong number fails before any work, with the name under which the user gave it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from outcore.sizing.deepspeed import Device, Precision
from outcore.sizing.swapping import check_positive_int

OffloadChoice = Literal["auto", "none", "cpu", "nvme"]

STAGES: dict[str, int] = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "infinity": 3}
STAGE_ALIASES = {"0": "none", "1": "zero1", "2": "zero2", "3": "zero3", "false": "none"}


def normalize_stage(stage: str | int | None) -> str | None:
    """`none|zero1|zero2|zero3|infinity`, also from 0/1/2/3. ValueError for anything else; None stays None."""
    if stage is None:
        return None
    name = STAGE_ALIASES.get(str(stage).strip().lower(), str(stage).strip().lower())
    if name not in STAGES:
        raise ValueError(f"zero_stage {stage!r} is unknown. Use one of none, zero1, zero2, zero3, infinity (or 0-3).")
    return name


@dataclass(frozen=True)
class DeepSpeedSettings:
    """The user's offload settings (the flags of the same names).

    A field that differs from its default, or that `explicit` names, was asked for by the user and wins over
    deepspeed_config.json; a field left at its default gives way to the file.
    """

    zero_stage: str | int | None = None
    """none, zero1, zero2, zero3, infinity, or 0-3. None: the file's `zero_optimization.stage`, else zero3."""
    nvme_offload_path: str | None = None
    """Folder on an NVMe drive. None: the file's `nvme_path`, `outcore.nvme_path`, or no NVMe."""
    nvme_offload_optimizer: bool = True
    """With infinity: optimizer states (fp32 master, moments) on the drive."""
    nvme_offload_params: bool = True
    """With infinity: 16-bit parameters on the drive."""
    nvme_offload_gradients: bool = False
    """With the optimizer on NVMe: 16-bit gradients on the drive too, which saves 2 B of RAM per parameter and is
    slower (docs/staged_offload.md)."""
    offload_optimizer: OffloadChoice = "auto"
    """Below infinity: where optimizer states live. auto: the file's device, else RAM for zero3 and the GPU
    otherwise."""
    offload_params: OffloadChoice = "auto"
    """Below infinity: where parameters live (zero3 only). auto: the file's device, else RAM for zero3."""
    aio_block_size: int = 1 << 20
    """Bytes per drive request."""
    aio_queue_depth: int = 8
    """Drive requests in flight per thread."""
    pin_memory: bool = True
    """Page-locked RAM for what is offloaded to RAM."""
    max_in_cpu_gb: float = 1.0
    """With parameters on NVMe: GB (10**9 bytes) of them per rank that stay in RAM."""
    strict_offload: bool = False
    """An unusable NVMe path is an error; otherwise the run falls back to RAM and a note says so."""
    explicit: frozenset[str] = frozenset()
    """Names of fields the user gave explicitly although they equal their default."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "zero_stage", normalize_stage(self.zero_stage))
        for name in ("offload_optimizer", "offload_params"):
            if getattr(self, name) not in ("auto", "none", "cpu", "nvme"):
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown. Use auto, none, cpu or nvme.")
        check_positive_int("aio_block_size", self.aio_block_size)
        check_positive_int("aio_queue_depth", self.aio_queue_depth)
        if self.aio_block_size % 4096:
            raise ValueError(
                f"aio_block_size {self.aio_block_size} is not a multiple of 4096 bytes: direct drive transfers need "
                "whole sectors. Use a power of two such as 1048576."
            )
        if self.aio_queue_depth > 4096:
            raise ValueError(f"aio_queue_depth {self.aio_queue_depth} is too large: kernels refuse it. Use 8 to 128.")
        if not _is_number(self.max_in_cpu_gb) or self.max_in_cpu_gb < 0:
            raise ValueError(f"max_in_cpu_gb must be 0 or more GB, got {self.max_in_cpu_gb!r}.")
        unknown = self.explicit - {f.name for f in fields(self)}
        if unknown:
            raise ValueError(f"explicit names no settings: {', '.join(sorted(unknown))}")

    def was_given(self, name: str) -> bool:
        """True when the user asked for this value (it is named explicit, or differs from the default)."""
        default = next(f.default for f in fields(self) if f.name == name)
        return name in self.explicit or getattr(self, name) != default


@dataclass(frozen=True)
class RunFacts:
    """Numbers of the run. None means "not said": deepspeed_config.json's value, else the documented default."""

    world_size: int = 1
    local_world_size: int | None = None
    """Ranks on this host. None: all of them."""
    device: Literal["cuda", "cpu"] = "cuda"
    precision: Precision | None = None
    micro_batch_size: int | None = None
    """Sequences per GPU and forward pass. Default 2."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step and GPU. Default 4."""
    learning_rate: float | None = None
    """Peak learning rate. Default 3e-4."""
    adam_beta1: float | None = None
    adam_beta2: float | None = None
    adam_epsilon: float | None = None
    weight_decay: float | None = None
    """Decoupled weight decay. Default 0.01."""
    max_grad_norm: float | None = None
    """Global gradient norm to clip at; 0 turns clipping off. Default 1.0."""
    run_name: str | None = None
    """Keeps this run's swap files apart from another run's on the same drive."""
    ram_available_bytes: int | None = None
    """RAM this run may take on this host; None turns the automatic spill to NVMe off."""
    memlock_limit_bytes: int | None = None
    """Most bytes the process may lock. None: ask the operating system."""

    def __post_init__(self) -> None:
        for name in (
            "world_size",
            "local_world_size",
            "micro_batch_size",
            "gradient_accumulation_steps",
        ):
            value = getattr(self, name)
            if value is not None:
                check_positive_int(name, value)
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f"device {self.device!r} is unknown. Use cuda or cpu.")
        if self.precision not in (None, "bf16", "fp16", "fp32"):
            raise ValueError(f"precision {self.precision!r} is unknown. Use bf16, fp16 or fp32.")
        if self.local_world_size is not None and self.local_world_size > self.world_size:
            raise ValueError(f"local_world_size {self.local_world_size} exceeds world_size {self.world_size}.")
        if self.run_name is not None and (self.run_name in ("", ".", "..") or "/" in self.run_name):
            raise ValueError(f"run_name {self.run_name!r} is no folder name: it must not be empty or contain '/'.")

    @property
    def local_ranks(self) -> int:
        """Ranks on this host."""
        return self.local_world_size or self.world_size


@dataclass(frozen=True)
class ChosenOffload:
    """Where things really are once every fallback was taken."""

    stage: int
    optimizer: Device
    params: Device
    nvme_path: str | None
    """Folder DeepSpeed is given (it removes and recreates `zero_stage_3` in it at start); None without NVMe."""
    locked_bytes: int
    """Page-locked RAM per rank that stock DeepSpeed's NVMe swap buffers take."""
    staged: bool = False
    """Whether outcore's own optimizer step and parameter swapper run in DeepSpeed's place (`staged/`)."""
    states: str = "fp32"
    """Format of the staged optimizer states."""
    ram_budget_bytes: int | None = None
    """Staged: RAM per rank for parameters, gradients, states and staging memory; what exceeds it lives on the drive.
    None: what was sent to the drive lives there whole."""
    gradients_on_nvme: bool = False
    """Staged: gradients live on the drive as well."""

    @property
    def uses_nvme(self) -> bool:
        """True when anything lives on the drive."""
        return "nvme" in (self.optimizer, self.params)


@dataclass(frozen=True)
class BuiltConfig:
    """A DeepSpeed configuration without any "auto", and why it is what it is."""

    config: dict[str, Any]
    notes: tuple[str, ...]
    offload: ChosenOffload
    warnings: tuple[str, ...] = field(default=())
    """The notes that must be shown loudly: fallbacks, changed user values, settings that cost much."""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
