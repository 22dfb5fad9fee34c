"""Other trainers: in one process, whatever a launcher set for several, and with a run's own checkpoints."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

import outcore.hf
from outcore.checkpoint import Checkpoint, save_checkpoint
from outcore.common.quantities import GIB
from outcore.config import RunSettings
from outcore.train.configure.schedule import LrSchedule

TRAINER = "trainer"
"""Folder of a checkpoint for what the trainer saves."""
TALKING = ("transformers", "trl", "peft", "accelerate", "datasets", "DeepSpeed")
"""Loggers of libraries that a foreign trainer brings along. What they say is of their own settings, which no user of
ours has made; what matters to a run we look at and say ourselves."""
AHEAD_BYTES = GIB
"""Bytes of batches that wait for the next step; one waits whatever its size."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def in_one_process() -> Iterator[None]:
    """Within this context trainers find no launcher's variables, for which they would wrap the model, draw no bars of
    their own, and tell no more than errors."""
    kept = {name: os.environ.pop(name) for name in LAUNCHER if name in os.environ}
    quiet = is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()
    disable_progress_bar()
    datasets.disable_progress_bars()
    talking = [logging.getLogger(name) for name in TALKING]
    levels = [logger.level for logger in talking]
    for logger in talking:
        logger.setLevel(logging.ERROR)
        logger.addFilter(_is_error)  # DeepSpeed sets its level again as it is imported
    try:
        with warnings.catch_warnings():  # an attribute's old name, which TRL and peft ask for
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        os.environ.update(kept)
        for logger, level in zip(talking, levels, strict=True):
            logger.setLevel(level)
            logger.removeFilter(_is_error)
        if quiet[0]:
            enable_progress_bar()
        if quiet[1]:
            datasets.enable_progress_bars()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def rows_hash(rows: Any) -> str:
    """Name of a run's rows: other ones have another."""
    return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()[:16]


def trained_numel(model: Any) -> int:
    """Parameters that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def optimizer_of(model: Any, settings: RunSettings, schedule: LrSchedule) -> tuple[Any, Any]:
    """(AdamW that clips by the exact norm, its schedule), as every run has them."""
    adamw = outcore.hf.optimizer(
        model,
        schedule.peak_lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm or None,
    )
    share: Callable[[int], float] = lambda step: schedule.lr(min(step, schedule.total_steps - 1)) / schedule.peak_lr  # noqa: E731
    return adamw, torch.optim.lr_scheduler.LambdaLR(adamw, share)


def save_as_ours(
    trainer: Any,
    folder: Path,
    state: dict[str, Any],
    *,
    keep: int,
    saved: Callable[[Path], None],
    say: Callable[[str], None],
) -> None:
    """Have the trainer's checkpoints written as a run's: aside, under a manifest with `state`, the oldest removed.
    `saved` hears of each."""
    write_theirs = trainer._save_checkpoint

    def save(model: Any, trial: Any = None) -> None:
        def write(aside: Path, on_file: Callable[[Path, int], None]) -> dict[str, Any]:
            before, trainer.args.output_dir = trainer.args.output_dir, str(aside / TRAINER)
            try:
                write_theirs(model, trial)
            finally:
                trainer.args.output_dir = before
            return {"tokens_seen": 0, **state}

        needed_bytes = 16 * trained_numel(trainer.model)  # fp32 masters and moments, and the weights
        saved(save_checkpoint(folder, trainer.state.global_step, write, needed_bytes=needed_bytes, keep=keep, say=say))

    trainer._save_checkpoint = save


class BatchesAhead:
    """Iterator over an epoch's batches, the next of which are made on a pool's only thread while others are used. An
    error of a batch is raised where that batch is taken."""

    def __init__(self, batches: Iterator[Any], pool: ThreadPoolExecutor) -> None:
        self.batches, self._pool = batches, pool
        self._coming = deque[Future[Any]]()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.begin(1)
        return self._coming.popleft().result()

    def begin(self, count: int) -> None:
        """Start making batches until `count` are ready or being made."""
        while len(self._coming) < count:
            self._coming.append(self._pool.submit(next, self.batches))


@contextmanager
def batches_ahead(trainer: Any) -> Iterator[None]:
    """Within this context the batches of the trainer's next step are made while a step runs, in the order that they
    have without it. They wait in RAM, in `AHEAD_BYTES`."""
    pool = ThreadPoolExecutor(1, "batches")
    loader_of, batches_of, ahead = trainer.get_train_dataloader, trainer.get_batch_samples, BatchesAhead(iter(()), pool)

    def loader() -> Any:
        made = loader_of()
        made.device = None  # the trainer moves a batch as its turn comes: those that wait take no VRAM
        return made

    def batches(epoch: Iterator[Any], count: int, device: torch.device) -> Any:
        nonlocal ahead
        if ahead.batches is not epoch:
            ahead = BatchesAhead(epoch, pool)
        found = batches_of(ahead, count, device)
        size = max((sum(value.nbytes for value in batch.values()) for batch in found[0]), default=1)
        ahead.begin(max(1, min(count, AHEAD_BYTES // size)))
        return found

    trainer.get_train_dataloader, trainer.get_batch_samples = loader, batches
    try:
        yield
    finally:
        pool.shutdown(cancel_futures=True)


def train_to_end(trainer: Any, checkpoint: Checkpoint | None, total_steps: int) -> None:
    """Turn the steps that are left, from what the trainer saved in `checkpoint`."""
    saved = None if checkpoint is None else str(next((checkpoint.path / TRAINER).glob("checkpoint-*")))
    if checkpoint is not None and checkpoint.step >= total_steps:
        # Killed between its last save and its export: within an epoch, transformers would turn one step more.
        trainer.args.max_steps, trainer.args.num_train_epochs = -1, 0
    trainer.train(resume_from_checkpoint=saved)
