"""From a checked configuration to a finished run: choose, build, train, and say what was chosen and why."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from outcore.checkpoint import Checkpoint, CheckpointError, changed_settings, newest_checkpoint
from outcore.checkpoint.export import how_to_load
from outcore.common import FileError, explain_error, file_errors
from outcore.common.quantities import format_count, format_s
from outcore.config import ConfigError, Place, RunSettings, TrainConfig, read_deepspeed_file, resolve
from outcore.data import PreparedData
from outcore.engine.base import Decision, Engine
from outcore.engine.deepspeed import init_process_group, prepare_environment
from outcore.model.settings import ModelSettings
from outcore.model.source import resolve_source
from outcore.monitor.watches import hold_off_sleep
from outcore.train.changes import settle_changes
from outcore.train.configure.arguments import parse_config
from outcore.train.configure.engine_choice import EngineChoice, choose_engine
from outcore.train.configure.rooms import choose_hardware, model_settings_of, run_length, schedule_of
from outcore.train.engine_build import EngineRequest, decide, open_engine
from outcore.train.fit_check import check_fit, why_not
from outcore.train.forecast import Forecaster
from outcore.train.hub_upload import check_login, push
from outcore.train.loop import Trainer
from outcore.train.process import StartupClock, StopRequest, fix_order, seed_everything, stay_offline, watch_launcher
from outcore.train.run_data import default_seq_length, load_data, load_tokenizer
from outcore.train.run_parts import RunContext, kept_on_drive
from outcore.train.runs import default_name, take_run_together
from outcore.train.telling import TOLD, plain_words, tell


class Run:
    """One training run, assembled step by step; `main` is the whole story."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.hardware = choose_hardware(config)
        self.is_main = True
        self.micro_batch_size = config.per_device_train_batch_size or 1
        self.engine_name = "deepspeed"
        """Who trains, as far as it is decided; advice for a full tier names that engine's settings."""
        self.opened = ExitStack()
        """What must be closed, also when assembling the rest fails; in reverse order."""
        self.told: BaseException | None = None
        """The error that the user has read."""
        self.phase = "starting"
        """What is being done, for an error of the system that says nothing of it."""
        self._said: list[str] = []
        self.clock = StartupClock()

    def say(self, line: str) -> None:
        """A line on the screen, from rank 0 only."""
        self._said.append(line)
        if self.is_main:
            print(line, flush=True)

    def main(self) -> int:
        """Train, evaluate, save, export; the process's exit code."""
        config, started_s = self.config, time.perf_counter()
        file, precision = read_deepspeed_file(config.deepspeed_config), self.hardware.precision
        run = resolve(config, file, Place(precision, self._join()))
        choice = choose_engine(run)
        settings = model_settings_of(config, precision, config.seq_length or default_seq_length(config, precision))
        if settings.model_module is None:
            resolve_source(settings)  # a wrong name or folder is told before anything is made, read or built
        if config.plan:
            return self._plan(run, choice, settings)
        if config.push_to_hub is not None and self.is_main:
            self.say(f"the model will be uploaded to {config.push_to_hub}, as {check_login(config.push_to_hub)}")
        with self.opened:
            return self._run(run, choice, settings, started_s)

    def _run(self, run: RunSettings, choice: EngineChoice, settings: ModelSettings, started_s: float) -> int:
        """From the run's name, which is this process's alone from here on, to its end."""
        config, world_size = self.config, run.world_size
        taken = take_run_together(config, self.say, world_size, is_main=self.is_main)
        folder, checkpoint = taken.folder, taken.checkpoint
        if taken.lock is not None:
            self.opened.callback(taken.lock.release)
            self.opened.callback(folder.remove_empty)
            folder.make()
        seed_everything(config.seed)
        if config.deterministic:
            fix_order()

        self.phase = "preparing tokenizer and data"
        with file_errors("preparing the tokenizer", config.data_cache_dir):
            tokenizer = load_tokenizer(config, settings, self.say)
        request = self._request(run, settings, tokenizer, folder.name)
        decided = decide(request, choice, self.say)
        self.engine_name = decided.name
        self.micro_batch_size = run.per_device_train_batch_size
        forecaster = Forecaster(settings, tokenizer, has_cuda=self.hardware.has_cuda, num_gpus=world_size)

        def check(decided: Decision) -> None:
            forecast = forecaster.of(decided, kept_on_drive(config, decided.nvme_path))
            check_fit(decided, forecaster, forecast, config.fit_check, self.say, world_size)

        check(decided)
        self.clock.mark("settings")
        with file_errors("preparing the data", config.data_cache_dir):
            data = load_data(config, settings, tokenizer, decided.loaded, self.say)
        self.phase = "building the engine"
        self.clock.mark("data")
        length = run_length(config, self._batches_per_epoch(data, world_size), run.gradient_accumulation_steps)
        schedule = schedule_of(config, dict(run.file.blocks), run.learning_rate, length.total_steps)
        context = RunContext(
            config, self.hardware, folder, decided, data, tokenizer, schedule, length, checkpoint, self.is_main
        )
        if checkpoint is not None:
            changes = settle_changes(checkpoint, context.fingerprint, on_purpose=config.continue_with_changes)
            for line in changes:
                self.say(f"resume: {line}, as asked")
            if changes:
                rate = f"{schedule.lr(checkpoint.step):g} at this step"
                self.say(f"resume: the schedule from here on: {schedule.words}; {rate}")
            context = replace(context, changes=tuple(changes))
        if self.hardware.has_cuda and self.is_main:
            hold = self.opened.enter_context(hold_off_sleep(f"outcore run {folder.name}"))
            if not hold.held:
                self.say(f"sleep: {hold.words}")
        self.clock.mark("plan")
        engine, decided = open_engine(request, decided, self.say, check)
        self.engine_name = decided.name
        self.opened.callback(engine.close)
        self.opened.push(self._tell)  # closing may have to wait for a drive that hangs: the reason comes first
        self.clock.mark("engine_init", of_it={"model_load": engine.loaded.load_s})
        self._say_model(engine)
        forecast = forecaster.of(decided, kept_on_drive(config, decided.nvme_path))
        if forecast.problem:
            self.say(forecast.problem)
        context = context.with_engine(decided, forecast)
        if checkpoint is not None:
            for line in changed_settings(checkpoint, context.changeable):
                self.say(line)
        context.start_trace(engine, self.say)
        parts = context.make_parts(engine, self.opened, self.say)
        self.opened.push(self._tell)
        self.opened.callback(parts.progress.close)  # which has the last line of the screen
        self.clock.mark("logs")
        self.say(self.clock.words())
        context.write_plan(self._said, self.clock.parts_s)
        return self._train(Trainer(parts, self.clock), context, started_s)

    def _tell(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            tell(error, self)

    def _request(self, run: RunSettings, settings: ModelSettings, tokenizer: Any, name: str) -> EngineRequest:
        return EngineRequest(run, settings, tokenizer, self.hardware, name, self.config.local_rank, self.config.trace)

    def _plan(self, run: RunSettings, choice: EngineChoice, settings: ModelSettings) -> int:
        """`--plan`: everything up to the engine's settings, then the forecast; the exit code says whether it fits."""
        config = self.config
        tokenizer = load_tokenizer(config, settings, self.say)
        request = self._request(run, settings, tokenizer, config.run_name or default_name(config))
        forecaster = Forecaster(settings, tokenizer, has_cuda=self.hardware.has_cuda, num_gpus=run.world_size)
        if forecaster.problem:
            raise ConfigError(f"--plan: {forecaster.problem}.")
        decided = decide(request, choice, self.say)
        decided.forget()
        forecast = forecaster.of(decided, kept_on_drive(config, decided.nvme_path))
        if forecast.plan is None:
            raise ConfigError(f"--plan: {forecast.problem}.")
        short = why_not(decided, forecast)
        if short:
            self.say(f"does not fit: {short}")
        if self.is_main:
            forecaster.show(forecast)
        return 1 if short or not forecast.plan.fits else 0

    def _join(self) -> int:
        """This run's number of processes. One process needs no group; DeepSpeed makes its own when it is chosen."""
        prepare_environment(self.hardware.has_cuda, self.config.local_rank)
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size > 1:
            init_process_group(self.hardware.has_cuda, self.config.local_rank)
            world_size = torch.distributed.get_world_size()
            self.is_main = torch.distributed.get_rank() == 0
        self.say(f"device: {self.hardware.reason}; {world_size} process{'es' if world_size > 1 else ''}")
        return world_size

    def _batches_per_epoch(self, data: PreparedData, world_size: int) -> int:
        return math.ceil(len(data.train) / (self.micro_batch_size * world_size))

    def _say_model(self, engine: Engine) -> None:
        facts = engine.loaded.facts
        words = f"model: {engine.loaded.words}: {format_count(facts.total_params)} parameters"
        if facts.trainable_params < facts.total_params:
            words += f", {format_count(facts.trainable_params)} trainable"
        self.say(words)

    def _train(self, trainer: Trainer, context: RunContext, started_s: float) -> int:
        parts, folder, checkpoint = trainer.parts, context.folder, context.checkpoint
        self.phase = "training"
        if checkpoint is not None:
            checkpoint = self._resume(trainer, checkpoint)
            self.say(f"resumed from {checkpoint.path} at step {trainer.step}")
            if trainer.step >= parts.length.total_steps:
                self.say(
                    f"already finished: the run has all of its {trainer.step} steps. To train longer: more --max_steps "
                    "or --num_train_epochs, with --continue_with_changes"
                )
        with StopRequest(parts.engine.world_size, parts.engine.device) as stop:
            finished = trainer.run(stop)
            parts.progress.close()
            stop.finishing = "finishing the export"
            if finished and (words := trainer.load_best()):
                self.say(words)
            if finished and self.config.export:
                self.phase = "exporting the model"
                adapter_only = self.config.lora_export == "adapter"
                parts.engine.export(folder.export, context.tokenizer, adapter_only=adapter_only)
        if not finished:
            saved = "saved. Go on with the same command and --resume_from_checkpoint auto"
            if trainer.saved_step != trainer.step:
                saved = f"not saved ({trainer.unsaved_because})"
            self.say(f"stopped at step {trainer.step} of {parts.length.total_steps} and {saved}")
            return stop.exit_code
        trainer.plot()
        taught = context.forecast.learn(list(trainer.steps_s), folder.name) if context.forecast and self.is_main else ""
        if taught:
            self.say(f"forecast: {taught}")
        self._summary(trainer, time.perf_counter() - started_s)
        if self.config.push_to_hub is not None and self.is_main:
            self.say(f"uploaded: {push(folder.export, self.config.push_to_hub, folder.name)}")
        return 0

    def _resume(self, trainer: Trainer, checkpoint: Checkpoint) -> Checkpoint:
        """Load it; on one process with `auto` the next older one should it fail after all. Returns the one loaded."""
        while True:
            try:
                trainer.resume(checkpoint)
                return checkpoint
            except (CheckpointError, FileError) as error:
                is_auto = self.config.resume_from_checkpoint == "auto" and trainer.parts.engine.world_size == 1
                if not is_auto or trainer.step == checkpoint.step:  # loaded: what failed came after
                    raise
                self.say(f"passing over a checkpoint that cannot be loaded: {checkpoint.path}: {error}")
                older = newest_checkpoint(checkpoint.path.parent, self.say, before=checkpoint.path)
                if older is None:
                    raise
                checkpoint = older

    def _summary(self, trainer: Trainer, seconds: float) -> None:
        folder, evals = trainer.parts.folder, trainer.last_eval
        words = f"done: {trainer.step} steps in {format_s(seconds)}"
        if trainer.first_loss is not None and trainer.last_loss is not None:
            words += f"; loss {trainer.first_loss:.3f} -> {trainer.last_loss:.3f}"
        if evals:
            words += f"; validation loss {evals['eval_loss']:.3f}, perplexity {evals['eval_perplexity']:.2f}"
        self.say(words)
        self.say(f"log and loss curve: {folder.logs}")
        if self.config.save_strategy != "no":
            self.say(f"checkpoints:        {folder.checkpoints}")
        if self.config.export:
            self.say(f"model:              {folder.export}  ({how_to_load(folder.export)})")


def main(
    argv: list[str] | None = None, make: Callable[[TrainConfig], Run] = Run, *, began_s: float | None = None
) -> int:
    """Entry of train_model.py: parse, run, and turn failures into one clear paragraph and an exit code.

    `began_s`: time.perf_counter before this module was imported; without it imports are not among the start's parts.

    0 done; 1 the run failed (checkpoints intact); 2 wrong input; 128 + signal when stopped and saved.
    """
    run: Run | None = None
    try:
        clock = StartupClock(began_s)
        config = parse_config(argv)
        watch_launcher(config.local_rank)
        stay_offline(config, print)
        run = make(config)
        run.clock = clock
        return run.main()
    except (*TOLD, KeyboardInterrupt) as error:
        tell(error, run)
        if isinstance(error, KeyboardInterrupt):
            return 130
        return 2 if isinstance(plain_words(error, run) or error, ValueError) else 1
    except Exception as error:  # libraries in Rust raise plain ones that only quote the system's number
        words = explain_error(error, run.phase if run is not None else "starting")
        if words is None:
            raise
        print(f"error: {words}", file=sys.stderr, flush=True)
        return 1
