"""Protocol of an engine, as the training loop sees it: seven verbs, and nothing of who moves the bytes.

Every engine trains the same mathematics: AdamW, exact global-norm clipping, and a loss averaged over all unmasked
tokens of the global batch (all micro-batches of all ranks). The loop owns the schedule and passes the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from outcore.checkpoint import CheckpointError
from outcore.common.errors import EngineError
from outcore.config import RunSettings
from outcore.sizing.layouts import DeepSpeedLayout, StreamLayout

MicroBatch = dict[str, torch.Tensor]
"""input_ids, labels [B, T] (labels not shifted, -100 = no loss), perhaps position_ids or attention_mask [B, T]."""


class NonFiniteLossError(EngineError):
    """The loss, or a gradient outside fp16's loss scaling, became NaN or infinite; the message says what to resume."""


LOWER_RATE = (
    "start a new run with a lower --learning_rate or more --warmup_steps, from the beginning or from the model of a "
    "checkpoint (outcore export, then --model_name_or_path)"
)
"""Advice after a number that is not finite: a resumed run keeps its schedule, so it would only come by again."""
NO_TARGETS = (
    "no token of this global batch counts for the loss: all its labels are masked (-100), so there is nothing to "
    "average a loss over. No step was made; weights and optimizer states are as they were before it. Check that rows "
    "have a completion after their prompt (the data's prompt and completion columns) and that it is not cut off "
    "(--seq_length), or put more rows into a step (--gradient_accumulation_steps)."
)
"""Message of `train_step`'s ValueError, which is raised before anything of the step has begun."""


@dataclass(frozen=True)
class StepResult:
    """Report of one optimizer step."""

    loss: float
    """Mean cross-entropy per unmasked token of the global batch, before the update (nats)."""
    aux_loss: float
    """Weighted mixture-of-experts auxiliary loss that was added to it (0 without)."""
    grad_norm: float
    """Global L2 norm of the gradients before clipping."""
    tokens: int
    """Unmasked label tokens of the global batch."""
    skipped: bool
    """True when a non-finite fp16 gradient made the engine skip the update and lower its loss scale."""
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: forward, backward, optimizer, and of these stall_nvme, stall_pcie, stall_optimizer (those the
    engine can tell)."""
    said: str = ""
    """Text for people: what the engine decided after this step; '' when nothing."""


@dataclass(frozen=True)
class EvalResult:
    """Mean loss (nats per token) over an evaluation set."""

    loss: float
    tokens: int


WARM_UP_STEPS = 3
"""Before traced or measured ones: compilation, first allocations, one step whose updates run under the next forward,
and one with layers that stay on the device from then on."""


@dataclass(frozen=True)
class TracePlan:
    """`num_steps` steps after `skip_steps`, numbered from `first_step` on, into `path`."""

    path: Path
    skip_steps: int
    num_steps: int
    first_step: int
    """Number of the engine's first step (1, or the one after a checkpoint)."""

    @classmethod
    def for_run(cls, path: Path, num_steps: int, steps_done: int, total_steps: int) -> TracePlan:
        """After the warm-up, or earlier in a run that is too short for it. ValueError for less than one step."""
        if num_steps < 1:
            raise ValueError(f"a trace needs at least one step, got {num_steps}")
        left = max(1, total_steps - steps_done)
        num_steps = min(num_steps, left)
        return cls(path, min(WARM_UP_STEPS, left - num_steps), num_steps, steps_done + 1)


@dataclass(frozen=True)
class EngineFacts:
    """Numbers of what an engine holds; None where it cannot tell."""

    state_bytes: int
    """Bytes that `save` writes, so that space is checked before it starts."""
    pinned_bytes: int | None
    """Pinned memory."""
    ram_bytes: int | None = None
    """Parameters, gradients and optimizer states in RAM, pinned or not."""
    nvme_bytes: int | None = None
    """Reserved on drives."""
    tiles: str = ""
    """Which parts are computed in tiles, and why; '' when none."""
    staying_bytes: int = 0
    """Device memory of layers that stay there, as long as nothing else needs it."""
    ahead_bytes: int = 0
    """RAM of updates that began before a step's norm was known."""
    doing: str = ""
    """Stage of the step: 'forward, layer 3'."""


@dataclass(frozen=True)
class Host:
    """Facts that the process knows of its machine and its run when an engine decides."""

    has_cuda: bool
    ram_available_bytes: int
    run_name: str
    """Keeps this run's files on a drive apart from another run's."""
    local_rank: int = -1
    is_wsl2: bool = False
    """Processes may pin little memory there."""
    write_combined: bool | None = None
    """Whether a fresh machine profile measured write-combined memory no slower. None: not measured."""


class Engine(Protocol):
    """One training engine. All methods are called on every rank."""

    name: str
    rank: int
    world_size: int
    device: torch.device
    loaded: Any
    """The `LoadedModel` that it trains."""

    def train_step(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """One optimizer step over this rank's micro-batches. ValueError when no token of the global batch counts."""
        ...

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> EvalResult:
        """Mean loss without updating anything; every rank gives the same number of micro-batches."""
        ...

    def sample(self, prompt_ids: list[int], max_new_tokens: int, end_tokens: Collection[int] | None) -> list[int]:
        """Continue a prompt greedily up to one of `end_tokens`, to show what the model has learned."""
        ...

    def save(self, folder: Path, on_file: Callable[[Path, int], None]) -> dict:
        """Write weights and optimizer states as safetensors shards into `folder`; returns the engine's JSON state.

        `on_file(path, crc32)` is called (on rank 0) for each finished file."""
        ...

    def facts(self) -> EngineFacts:
        """Numbers of what this rank's engine holds now. May be called at any time, from any thread."""
        ...

    def load(self, folder: Path, state: dict) -> None:
        """Restore exactly what `save` wrote. CheckpointError when it does not fit this model."""
        ...

    def export(self, folder: Path, tokenizer: Any = None, adapter_only: bool = False) -> None:
        """Write the 16-bit model for `from_pretrained`, shard by shard; with LoRA merged, or the adapter alone."""
        ...

    def describe(self) -> str:
        """Lines for people: what was chosen."""
        ...

    def trace(self, plan: TracePlan, say: Callable[[str], None]) -> None:
        """Record a timeline of some steps into a file. EngineError where the engine draws none."""
        ...

    def close(self) -> None:
        """Release memory, files and process groups; safe to call twice."""
        ...


class Decision(Protocol):
    """All that an engine chose for a run, before memory is spent: printable, and the way to the engine itself."""

    @property
    def name(self) -> str:
        """The engine's."""
        ...

    @property
    def reason(self) -> str:
        """Why this engine."""
        ...

    @property
    def draws_timeline(self) -> bool:
        """Whether its engine records a trace."""
        ...

    @property
    def is_auto(self) -> bool:
        """Whether another engine may take over when this one cannot."""
        ...

    @property
    def loaded(self) -> Any:
        """A model_module's own model, which had to be built to be known; else None."""
        ...

    @property
    def settings(self) -> RunSettings:
        """Settings that were resolved for the run."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """A line per choice."""
        ...

    @property
    def nvme_path(self) -> str | None:
        """Folder of states during the run, when on a drive."""
        ...

    @property
    def shortage(self) -> str:
        """Why it does not fit this machine's RAM, in words; '' when it does, or when only the planner can tell."""
        ...

    @property
    def state_format(self) -> str:
        """Format of the optimizer states."""
        ...

    @property
    def layout(self) -> StreamLayout | DeepSpeedLayout:
        """Layout of the run, as the planner counts it."""
        ...

    def words(self) -> list[str]:
        """Lines to show before anything is read or built."""
        ...

    def record(self) -> dict[str, Any]:
        """Plain values for plan.json."""
        ...

    def forget(self) -> None:
        """Undo what deciding left behind, where no run follows."""
        ...

    def open(self, model: Any, tokenizer: Any, say: Callable[[str], None]) -> Engine:
        """Load the model that these `ModelSettings` name and make the engine."""
        ...


def grouped(keys: Sequence[str], most: int | None = None) -> str:
    """Join dotted keys in one line, block by block: 'zero_optimization (a, b), aio'. A block with more than `most` keys
    is only counted (plan.json has them all)."""
    blocks: dict[str, list[str]] = {}
    for key in keys:
        block, _, rest = key.partition(".")
        blocks.setdefault(block, []).extend([rest] if rest else [])
    words = {
        block: ", ".join(rest) if most is None or len(rest) <= most else f"{len(rest)} keys"
        for block, rest in blocks.items()
    }
    return ", ".join(f"{block} ({inside})" if inside else block for block, inside in words.items())


def check_optimizer(folder: Path, state: Mapping[str, Any], optimizer: str) -> None:
    """CheckpointError for the states of another optimizer. `state`: what the engine's `save` gave."""
    saved = state.get("optimizer", "adamw")
    if saved != optimizer:
        raise CheckpointError(
            f"{folder}: holds the states of {saved}, and this run's optimizer is {optimizer}. Resume with --optimizer "
            f"{saved}, or start a new run from its exported model."
        )
