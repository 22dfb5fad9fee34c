"""What the staged engine is told: one frozen dataclass, made from the resolved configuration and checked at once."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.engine.deepspeed.settings import ELEMENT_BYTES, BuiltConfig, ModelFacts, RunFacts
from outcore.engine.deepspeed.swapping import partition_numel
from outcore.optim import default_num_threads, state_format
from outcore.optim.backend import BackendName

PADDING_BYTES = 8192
"""Per tensor: pages that its homes do not fill, and DeepSpeed's padding of shares."""


@dataclass(frozen=True)
class StagedPlan:
    """ValueError for what cannot work. All sizes are of one rank."""

    states: str = "split"
    """Format of the optimizer states: fp32, split (bf16 only, the same numbers in 10 B instead of 12), or with 8-bit
    moments fp32_m8, split8."""
    home_bytes: int = 0
    """Parameters and gradients that will live in RAM, as far as known before the model is made."""
    staging_bytes: int = 0
    """Pinned memory through which bytes flow; 0 with everything in RAM."""
    pin: bool = True
    """Pin the homes of parameters and gradients."""
    optimizer_threads: int | None = None
    """None: all cores but two."""
    optimizer_backend: BackendName = "auto"

    def __post_init__(self) -> None:
        state_format(self.states)
        for name in ("home_bytes", "staging_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


def make_plan(built: BuiltConfig, model: ModelFacts, run: RunFacts) -> StagedPlan:
    """From a resolved configuration (`build_config(..., staged=True)`) and the facts of the run."""
    zero = built.config["zero_optimization"]
    element_bytes = ELEMENT_BYTES["bf16" if built.config.get("bf16", {}).get("enabled") else "fp32"]
    if built.config.get("fp16", {}).get("enabled"):
        element_bytes = ELEMENT_BYTES["fp16"]
    trainable = partition_numel(model.trainable, run.world_size)
    whole = partition_numel(model.total_params, run.world_size)
    params = trainable if built.offload.params == "none" else whole
    return StagedPlan(
        states=built.offload.states,
        home_bytes=(params + trainable) * element_bytes + max(1, model.num_tensors) * PADDING_BYTES,
        pin=bool(zero["offload_optimizer"].get("pin_memory", True)),
        optimizer_threads=max(1, default_num_threads() // run.local_ranks),
    )
