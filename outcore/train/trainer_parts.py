"""What the training loop is handed: the engine, the data, the schedule, how long the run is, and where it reports.

The best evaluation so far: which step had it, and how many evaluations since were no better."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from outcore.config import TrainConfig
from outcore.data import BatchStream
from outcore.engine.base import Engine, MicroBatch
from outcore.monitor import MetricsLog, RunProgress, Sampler
from outcore.runs import RunFolder
from outcore.train.configure.schedule import LrSchedule, RunLength


@dataclass
class BestSoFar:
    """Lower is better. Its state goes into every checkpoint, so that a resumed run goes on counting."""

    metric: str = "eval_loss"
    patience: int | None = None
    """Evaluations in a row that were not better enough after which the run ends; None: it never does."""
    threshold: float = 0.0
    """Amount by which a value must be lower than the best before it not to count towards `patience`. A lower one by
    less is the best all the same."""
    step: int | None = None
    value: float = math.inf
    evaluations_since: int = 0

    def see(self, step: int, value: float) -> bool:
        """Take in an evaluation; True when it is the best so far."""
        is_enough = value < self.value - (self.threshold if self.step is not None else 0.0)
        self.evaluations_since = 0 if is_enough else self.evaluations_since + 1
        is_best = value < self.value
        if is_best:
            self.step, self.value = step, value
        return is_best

    @property
    def is_over(self) -> bool:
        """True when the run has waited long enough for a better one."""
        return self.patience is not None and self.evaluations_since >= self.patience

    @property
    def words(self) -> str:
        """For people: the best and where it was."""
        return f"step {self.step}, {self.metric} {self.value:.4f}"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"metric": self.metric, "step": self.step, "value": self.value, "since": self.evaluations_since}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint; another metric, or a checkpoint without one, starts anew."""
        if state and state.get("metric") == self.metric and state.get("step") is not None:
            self.step, self.value = int(state["step"]), float(state["value"])
            self.evaluations_since = int(state["since"])


@dataclass
class TrainerParts:
    """What the loop works with."""

    config: TrainConfig
    folder: RunFolder
    engine: Engine
    stream: BatchStream
    eval_batches: Callable[[], Iterator[MicroBatch]] | None
    schedule: LrSchedule
    length: RunLength
    sampler: Sampler
    progress: RunProgress
    metrics: MetricsLog | None
    loggers: Any
    prompt_ids: list[int]
    decode: Callable[[list[int]], str]
    end_tokens: Collection[int]
    """Tokens at which a sample ends, as an answer does."""
    fingerprint: dict[str, Any]
    settings: dict[str, Any]
    """Saved with a checkpoint to tell what a resumed run has changed."""
    made_of: dict[str, Any]
    """Saved with a checkpoint to know its tokenizer and its base again."""
    warnings: Any
    """Turns a step's metrics into words for people, each once (`outcore.monitor.watches.run_warnings`)."""
    watches: tuple[Any, ...] = ()
    """Free space and memory, looked at every step; a verdict that says so stops the run after a save."""
    max_skips: int = 20
    best: BestSoFar | None = None
    """Which evaluation was the best, where the run keeps that model or stops early; None: it does neither."""
    keeps_data_position: bool = True
    """Whether a resumed run goes on in its data where the checkpoint was; not where the data was changed on purpose."""
    tokenizer: Any = None
    """Kept beside the weights of every checkpoint, so that it can be exported without the run; None: left out."""
