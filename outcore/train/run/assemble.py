"""From a checked configuration to a run that is ready to train: choose, prepare, build, and say why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from outcore.checkpoint import changed_settings
from outcore.checkpoint.export import check_login
from outcore.common import file_errors
from outcore.common.quantities import format_count
from outcore.config import ConfigError, RunSettings, read_deepspeed_file, resolve
from outcore.data import PreparedData
from outcore.engine.base import Decision, Engine
from outcore.engine.decide import choose_engine
from outcore.model import ModelSettings, resolve_source
from outcore.monitor.watches import hold_off_sleep
from outcore.runs import TakenRun, default_name, take_run_together
from outcore.train.changes import changed_by_version, settle_changes, settle_materials
from outcore.train.configure.rooms import epoch_words, model_settings_of, run_length, schedule_of
from outcore.train.loop import TrainingLoop
from outcore.train.process import fix_order, seed_everything
from outcore.train.run.context import RunContext
from outcore.train.run.data import default_seq_length, load_data
from outcore.train.run.job import RunJob
from outcore.train.run.planned import Planned
from outcore.train.run.space import check_drives
from outcore.train.run.telling import tell_at_exit


@dataclass(frozen=True)
class Ready:
    """A run with everything built, before its first step."""

    job: RunJob
    trainer: TrainingLoop
    context: RunContext


def settle(job: RunJob) -> tuple[RunSettings, ModelSettings]:
    """Settle and check everything that needs neither model nor data; a wrong name or folder is told here, before
    anything is made, read or built."""
    config, precision = job.config, job.device.precision
    if config.train_vision is not None:
        raise ConfigError("train_vision: only `outcore train` trains on pictures; leave it out here.")
    settings = resolve(config, read_deepspeed_file(config.deepspeed_config), job.join(precision))
    choose_engine(settings)
    model = model_settings_of(config, precision, config.seq_length or default_seq_length(config, precision))
    if model.model_module is None:
        resolve_source(model)
    return settings, model


def show_plan(job: RunJob, settings: RunSettings, model: ModelSettings) -> int:
    """`--plan`: everything up to the engine's decision, then the forecast; the exit code says whether it fits."""
    planned = Planned(job, settings, model, job.config.run_name or default_name(job.config))
    if planned.forecaster.problem:
        raise ConfigError(f"--plan: {planned.forecaster.problem}.")
    decision = planned.decide()
    decision.forget()
    forecast = planned.forecast(decision)
    if forecast.plan is None:
        raise ConfigError(f"--plan: {forecast.problem}.")
    short = forecast.why_not(decision.shortage)
    if short:
        job.say(f"does not fit: {short}")
    if job.is_main:
        planned.forecaster.show(forecast, job.config)
    return 1 if short or not forecast.plan.fits else 0


def assemble(job: RunJob, settings: RunSettings, model: ModelSettings) -> Ready:
    """Take the run's name, which is this process's alone from here on, and build all that it trains with."""
    config = job.config
    if config.push_to_hub is not None and job.is_main:
        job.say(f"the model will be uploaded to {config.push_to_hub}, as {check_login(config.push_to_hub)}")
    taken = _take(job, settings)
    job.phase = "preparing tokenizer and data"
    planned = Planned(job, settings, model, taken.folder.name, taken.checkpoint)
    made_of = settle_materials(config, model, planned.tokenizer, taken.checkpoint, job.say)
    decision = planned.decide(taken.checkpoint)
    planned.check(decision)
    check_drives(config, taken.folder, planned.forecast(decision).plan, job.device.precision)
    job.clock.mark("settings")
    with file_errors("preparing the data", config.data_cache_dir):
        data = load_data(config, model, planned.tokenizer, decision.loaded, job.say)
    job.phase = "building the engine"
    job.clock.mark("data")
    context = _context(job, taken, decision, data, planned.tokenizer)
    _stay_awake(job, taken.folder.name)
    job.clock.mark("plan")
    engine, decision = planned.open(decision)
    job.clock.mark("engine_init", of_it={"model_load": engine.loaded.load_s})
    job.say(_model_words(engine))
    forecast = planned.forecast(decision)
    steps = context.length.total_steps - (taken.checkpoint.step if taken.checkpoint else 0)
    if words := forecast.problem or forecast.of_steps(steps):
        job.say(words)
    return _ready(job, replace(context, decided=decision, forecast=forecast, made_of=made_of), engine)


def _take(job: RunJob, settings: RunSettings) -> TakenRun:
    config = job.config
    taken = take_run_together(config, job.say, settings.world_size, is_main=job.is_main)
    if taken.lock is not None:
        job.opened.callback(taken.lock.release)
        job.opened.callback(taken.folder.remove_empty)
        taken.folder.make()
    seed_everything(config.seed)
    if config.deterministic:
        fix_order()
    return taken


def _context(job: RunJob, taken: TakenRun, decision: Decision, data: PreparedData, tokenizer: Any) -> RunContext:
    """Length, schedule, and what a resumed run changes on purpose."""
    config, settings, checkpoint = job.config, decision.settings, taken.checkpoint
    length = run_length(config, len(data.train), settings.train_batch_size, settings.gradient_accumulation_steps)
    if settings.train_batch_size > len(data.train):
        job.say(
            f"WARNING: a step takes {settings.train_batch_size:,} rows, and the data has {len(data.train):,}: each "
            "step trains on some of them twice or more. Lower --gradient_accumulation_steps (or the micro-batch)."
        )
    if words := epoch_words(config, len(data.train), settings.train_batch_size):
        job.say(words)
    schedule = schedule_of(config, settings.file, settings.learning_rate, length.total_steps)
    context = RunContext(
        config, job.device, taken.folder, decision, data, tokenizer, schedule, length, checkpoint, job.is_main
    )
    if checkpoint is None:
        return context
    changes = settle_changes(checkpoint, context.fingerprint, on_purpose=config.continue_with_changes)
    for line in changes:
        job.say(f"resume: {line}, as asked")
    if changes:
        rate = f"{schedule.lr(checkpoint.step):g} at this step"
        job.say(f"resume: the schedule from here on: {schedule.words}; {rate}")
    by_version = changed_by_version(checkpoint, context.fingerprint, decay_all=settings.decay_all)
    for line in by_version:
        job.say(f"resume: {line}")
    return replace(context, changes=(*changes, *by_version))


def _stay_awake(job: RunJob, name: str) -> None:
    if job.device.has_cuda and job.is_main:
        hold = job.opened.enter_context(hold_off_sleep(f"outcore run {name}"))
        if not hold.held:
            job.say(f"sleep: {hold.words}")


def _ready(job: RunJob, context: RunContext, engine: Engine) -> Ready:
    """Logs, watches and the loop around an engine; the run's plan is written."""
    if context.checkpoint is not None:
        for line in changed_settings(context.checkpoint, context.changeable):
            job.say(line)
    context.start_trace(engine, job.say)
    parts = context.make_parts(engine, job.opened, job.say)
    tell_at_exit(job)
    job.opened.callback(parts.progress.close)  # which has the last line of the screen
    job.clock.mark("logs")
    job.say(job.clock.words())
    context.write_plan(job.said, job.clock.parts_s)
    return Ready(job, TrainingLoop(parts, job.clock), context)


def _model_words(engine: Engine) -> str:
    facts = engine.loaded.facts
    words = f"model: {engine.loaded.words}: {format_count(facts.total_params)} parameters"
    if facts.trainable_params < facts.total_params:
        words += f", {format_count(facts.trainable_params)} trainable"
    return words
