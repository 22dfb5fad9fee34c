"""What the training loop is handed: the engine, the data, the schedule, how long the run is, and where it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from outcore.config import TrainConfig
from outcore.data import BatchStream
from outcore.engine.base import Engine, MicroBatch
from outcore.monitor import MetricsLog, RunProgress, Sampler
from outcore.runs import RunFolder
from outcore.train.best import BestSoFar
from outcore.train.configure.schedule import LrSchedule, RunLength


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
    eos_token_id: int | None
    fingerprint: dict[str, Any]
    settings: dict[str, Any]
    """Saved with a checkpoint to tell what a resumed run has changed."""
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
