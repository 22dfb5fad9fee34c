"""What the user settles of a run; None is left to the planner, which says what it chose and why."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.config import check_said

FIELD_OF = {
    "seq_length": "seq_length",
    "micro_batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "save_total_limit": "save_total_limit",
    **{name: name for name in ("max_grad_norm", "engine", "zero_stage", "residency", "state_format", "precision")},
}
"""What a flag may be, this may be -> the flag."""
STAGES = ("none", "zero1", "zero2", "zero3", "infinity")


@dataclass(frozen=True)
class RunRequest:
    """Settings of a run that memory and time depend on."""

    seq_length: int | None = None
    """Tokens per row. None: 1,024, or all that the model can take when that is less."""
    micro_batch: int | None = None
    """Sequences per GPU and pass."""
    accumulation: int | None = None
    """Micro-batches per optimizer step."""
    engine: str = "auto"
    zero_stage: str | None = None
    residency: str | None = None
    """Home of parameters and optimizer states: ram, or nvme; auto or None: RAM as far as they fit."""
    state_format: str | None = None
    """Format of optimizer states that outcore moves, streaming or with staged offload
    (`sizing.states.STATE_FORMATS`). None: lossless, as small as possible."""
    optimizer: str = "adamw"
    precision: str = "bf16"
    activation_checkpointing: bool = True
    max_grad_norm: float = 1.0
    """0: no clipping; then updates start during the backward pass and gradients need not be kept."""
    staging_bytes: int | None = None
    """Pinned staging pool of the streaming engine. None: 8 GiB, or what the machine lets a process pin."""
    save_total_limit: int = 2
    """Checkpoints kept; one more exists while it is being written."""
    checkpoints_elsewhere: bool = False
    """Checkpoints go to another drive than the states."""

    def __post_init__(self) -> None:
        check_said({name: getattr(self, own) for own, name in FIELD_OF.items()})

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or activation as it is computed with."""
        return 4 if self.precision == "fp32" else 2

    @property
    def clips(self) -> bool:
        return self.max_grad_norm > 0

    @property
    def format(self) -> str:
        """The state format, chosen where it was left open: lossless split for bf16, fp32 otherwise."""
        return self.state_format or ("split" if self.precision == "bf16" else "fp32")
