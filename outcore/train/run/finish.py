"""A run that is ready, trained to its end: resume, train, export, and say what came of it."""

from __future__ import annotations

import time

from outcore.checkpoint import Checkpoint, CheckpointError, newest_checkpoint
from outcore.checkpoint.export import how_to_load, push
from outcore.common import FileError
from outcore.common.quantities import counted, format_s
from outcore.train.process.stop_request import StopRequest
from outcore.train.run.assemble import Ready


def train_to_end(ready: Ready) -> int:
    """Train, evaluate, save, export; the process's exit code."""
    job, trainer, context = ready.job, ready.trainer, ready.context
    parts, folder, checkpoint = trainer.parts, context.folder, context.checkpoint
    job.phase = "training"
    job.saved = lambda: trainer.saved_path
    if checkpoint is not None:
        checkpoint = _resume(ready, checkpoint)
        job.say(f"resumed from {checkpoint.path} at step {trainer.step}")
        if trainer.step >= parts.length.total_steps:
            job.say(
                f"already finished: the run has all of its {trainer.step} steps. To train longer: more --max_steps "
                "or --num_train_epochs, with --continue_with_changes"
            )
    with StopRequest(parts.engine.world_size, parts.engine.device) as stop:
        finished = trainer.run(stop)
        parts.progress.close()
        stop.finishing = "finishing the export"
        if finished and (words := trainer.load_best()):
            job.say(words)
        if finished and job.config.export:
            job.phase = "exporting the model"
            adapter_only = job.config.lora_export == "adapter"
            parts.engine.export(folder.export, context.tokenizer, adapter_only=adapter_only)
    if not finished:
        saved = "saved. Go on with the same command and --resume_from_checkpoint auto"
        if trainer.saved_step != trainer.step:
            saved = f"not saved ({trainer.unsaved_because})"
        job.say(f"stopped at step {trainer.step} of {parts.length.total_steps} and {saved}")
        return stop.exit_code
    if parts.metrics is not None:
        parts.metrics.sync()  # whose folder is told to the user below: it has to be there
    trainer.plot()
    if context.forecast and job.is_main:
        is_ahead = parts.engine.facts().ahead_bytes > 0
        if taught := context.forecast.learn(list(trainer.steps_s), folder.name, is_ahead=is_ahead):
            job.say(f"forecast: {taught}")
    _summary(ready, time.perf_counter() - job.started_s)
    if job.config.push_to_hub is not None and job.is_main:
        job.say(f"uploaded: {push(folder.export, job.config.push_to_hub, folder.name)}")
    return 0


def _resume(ready: Ready, checkpoint: Checkpoint) -> Checkpoint:
    """Load it; on one process with `auto` the next older one should it fail after all. Returns the one loaded."""
    job, trainer = ready.job, ready.trainer
    while True:
        try:
            trainer.resume(checkpoint)
            return checkpoint
        except (CheckpointError, FileError) as error:
            is_auto = job.config.resume_from_checkpoint == "auto" and trainer.parts.engine.world_size == 1
            if not is_auto or trainer.step == checkpoint.step:  # loaded: what failed came after
                raise
            job.say(f"passing over a checkpoint that cannot be loaded: {checkpoint.path}: {error}")
            older = newest_checkpoint(checkpoint.path.parent, job.say, before=checkpoint.path)
            if older is None:
                raise
            if trainer.parts.metrics is not None:
                trainer.parts.metrics.go_back_to(older.step)
            checkpoint = older


def _summary(ready: Ready, seconds: float) -> None:
    job, trainer, folder, evals = ready.job, ready.trainer, ready.context.folder, ready.trainer.last_eval
    now = trainer.num_steps
    of_them = "" if now == trainer.step else f", {now or 'none'} of them by this process"
    words = f"done: {counted(trainer.step, 'step')}{of_them} in {format_s(seconds)}"
    if trainer.first_loss is not None and trainer.last_loss is not None:
        words += f"; loss {trainer.first_loss:.3f} -> {trainer.last_loss:.3f}"
    if evals:
        words += f"; validation loss {evals['eval_loss']:.3f}, perplexity {evals['eval_perplexity']:.2f}"
    job.say(words)
    saved = f"\ncheckpoints:        {folder.checkpoints}" * (job.config.save_strategy != "no")
    job.say(f"log and loss curve: {folder.logs}{saved}")
    if job.config.export:
        job.say(f"model:              {folder.export}  ({how_to_load(folder.export)})")
