"""What the user settles of a run; None is left to the planner, which says what it chose and why."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.config import check_state_format
from outcore.sizing.states import STATE_FORMATS

STAGES = ("none", "zero1", "zero2", "zero3", "infinity")
ENGINES = ("auto", "stream", "deepspeed")
PRECISIONS = ("bf16", "fp16", "fp32")


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
    state_format: str | None = None
    """Of optimizer states that outcore moves, streaming or with staged offload (`constants.STATE_FORMATS`). None:
    lossless, as small as possible."""
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
        for name in ("seq_length", "micro_batch", "accumulation", "save_total_limit"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} is {value!r}, but must be a whole number of at least 1.")
        _one_of("engine", self.engine, ENGINES)
        _one_of("precision", self.precision, PRECISIONS)
        if self.zero_stage is not None:
            _one_of("zero_stage", self.zero_stage, STAGES)
        if self.state_format is not None:
            _one_of("state_format", self.state_format, tuple(STATE_FORMATS))
            check_state_format(self.state_format, self.precision)
        if self.max_grad_norm < 0:
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}, but must be 0 (off) or more.")
        if self.engine == "stream" and self.zero_stage in ("none", "zero1", "zero2"):
            raise ValueError(
                f"engine stream and zero_stage {self.zero_stage} contradict each other: the streaming engine is ZeRO-3 "
                "or Infinity. Leave one of them out."
            )

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


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(allowed)}.")
