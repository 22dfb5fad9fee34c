"""From a checked configuration to a run that is ready to train: choose, prepare, build, and say why.

What the training loop works with, put together: streams, sampler, logs, watches, and the run's header and plan."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from typing import Any

import torch

from outcore import __version__
from outcore.checkpoint import Checkpoint, changed_settings, model_fingerprint
from outcore.checkpoint.export import check_login
from outcore.checkpoint.materials import Material
from outcore.common import file_errors
from outcore.common.quantities import format_count
from outcore.config import ConfigError, RunSettings, TrainConfig, read_deepspeed_file, resolve
from outcore.data import BatchStream, DataError, EvalStream, PreparedData
from outcore.data.chat import end_tokens_of
from outcore.engine.base import Decision, Engine, TracePlan
from outcore.engine.decide import choose_engine
from outcore.model import ModelSettings, resolve_source
from outcore.model.facts import set_end_tokens
from outcore.model.forward import unwrap
from outcore.monitor import MetricsLog, RunProgress, Sampler
from outcore.monitor.metrics import MetricsServer, make_loggers
from outcore.monitor.watches import MemoryWatch, RunWarnings, SpaceWatch, hold_off_sleep
from outcore.plan.run import Forecast
from outcore.runs import RunFolder, TakenRun, default_name, take_run_together
from outcore.train.changes import began_from, changed_by_version, settle_changes, settle_materials
from outcore.train.configure.rooms import (
    ComputeDevice,
    epoch_words,
    lora_alpha,
    model_settings_of,
    run_length,
    schedule_of,
)
from outcore.train.configure.schedule import LrSchedule, RunLength
from outcore.train.loop import BestSoFar, TrainerParts, TrainingLoop, sample_prompt
from outcore.train.process.random_state import fix_order, seed_everything
from outcore.train.run.data import default_seq_length, load_data
from outcore.train.run.job import RunJob
from outcore.train.run.planned import Planned, check_drives, export_bytes, space_reserves
from outcore.train.run.telling import tell_at_exit

SAME_RUN = ("use_dora", "use_rslora", "quantize", "label_smoothing", "seed")
CHANGEABLE = (
    "per_device_train_batch_size", "weight_decay", "decay_all", "adam_beta1", "adam_beta2", "adam_epsilon",
    "max_grad_norm",
)  # fmt: skip


@dataclass(frozen=True)
class RunContext:
    """Decisions of a run, settled before the loop's parts are made."""

    config: TrainConfig
    device: ComputeDevice
    folder: RunFolder
    decided: Decision
    data: PreparedData
    tokenizer: Any
    schedule: LrSchedule
    length: RunLength
    checkpoint: Checkpoint | None
    is_main: bool
    changes: tuple[str, ...] = ()
    """Changes of a resumed run, made on purpose or by this version, a line each."""
    made_of: Mapping[str, Material] = field(default_factory=dict)
    """The run's tokenizer, and the base below an adapter."""
    forecast: Forecast | None = None
    """Forecast of the planner for this run, once its engine is there."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Settings that make a resumed run the same run, as far as they are known before the model is loaded."""
        return {
            "precision": self.device.precision,
            "train_batch_size": self.decided.settings.train_batch_size,
            "lora_r": self.config.lora_r,
            "lora_alpha": lora_alpha(self.config),
            "lora_modules_to_save": self.config.lora_modules_to_save or "",
            **{name: getattr(self.config, name) for name in SAME_RUN},
            "schedule": asdict(self.schedule),
        }

    @property
    def changeable(self) -> dict[str, Any]:
        """Settings by flag that a resumed run may change: its checkpoint does not depend on them, what follows does."""
        return {
            **{name: getattr(self.decided.settings, name) for name in CHANGEABLE},
            "lora_dropout": self.config.lora_dropout,
            "neftune_noise_alpha": self.config.neftune_noise_alpha,
            "state_format": self.decided.state_format,
        }

    def start_trace(self, engine: Engine, say: Callable[[str], None]) -> None:
        """Have the steps that `--trace` asks for recorded, if any."""
        if not self.config.trace:
            return
        steps_done = self.checkpoint.step if self.checkpoint else 0
        plan = TracePlan.for_run(
            self.folder.logs / "trace.json", self.config.trace, steps_done, self.length.total_steps
        )
        engine.trace(plan, say)

    def make_parts(self, engine: Engine, opened: ExitStack, say: Callable[[str], None]) -> TrainerParts:
        """The loop's parts; what must be closed is left with `opened`."""
        config, folder, is_main = self.config, self.folder, self.is_main
        micro = self.decided.settings.per_device_train_batch_size
        eval_micro = config.per_device_eval_batch_size or micro
        group_rows = self.decided.settings.train_batch_size if config.group_by_length else 0
        stream = BatchStream(
            self.data.train, micro, engine.rank, engine.world_size, seed=config.seed, group_rows=group_rows
        )
        end_tokens = set_end_tokens(unwrap(engine.loaded.model), self.tokenizer, self.data.summary.end_tokens, say)
        fingerprint = {"parameters": engine.loaded.facts.total_params, **self.fingerprint}
        if (model := model_fingerprint(engine.loaded.config)) is not None:
            fingerprint["model"] = model
        keeps_data_position = self._settle_data(fingerprint, stream, say)  # before the log is cut off at its step
        evals = None
        if self.data.eval is not None and config.eval_strategy != "no":
            evals = EvalStream(self.data.eval, eval_micro, engine.rank, engine.world_size)
        gpu = str(torch.cuda.get_device_properties(engine.device).uuid) if self.device.has_cuda else None
        nvme_path = self.decided.nvme_path
        sampler = Sampler(nvme_path or folder.checkpoints, gpu=gpu, pinned_bytes=lambda: engine.facts().pinned_bytes)
        opened.callback(sampler.start().close)
        resume_step = self.checkpoint.step if self.checkpoint else None
        loggers = make_loggers(config.report_to, folder.logs, resume_step=resume_step, enabled=is_main, say=say)
        opened.callback(loggers.close)
        if config.metrics_port is not None and is_main:
            loggers.add("metrics server", MetricsServer(config.metrics_port, run=folder.name, say=say))
        metrics = None
        if is_main:
            header = self._header(engine, sampler, end_tokens)
            metrics = MetricsLog(folder.metrics, resume_step=resume_step, say=say)
            opened.callback(metrics.close)
            if metrics.damaged_lines:
                say(
                    f"WARNING: {folder.metrics}: {metrics.damaged_lines} line(s) were torn by a crash or damaged on "
                    "the drive, and are left out: the curve has a gap there, the training none"
                )
            metrics.write_header(header)
            loggers.log_header(header)
        facts, state_bytes = engine.loaded.facts, engine.facts().state_bytes
        exported = export_bytes(config, facts.total_params, facts.trainable_params, self.device.precision)
        space = SpaceWatch(space_reserves(config, folder, nvme_path, state_bytes, exported))
        progress = RunProgress(
            self.length.total_steps,
            first_step=resume_step or 0,
            plain_every_steps=config.logging_steps,
            limits=sampler.describe(),
            enabled=is_main,
            doing=lambda: engine.facts().doing,
        )
        opened.callback(progress.close)
        tokenizer = self.tokenizer
        return TrainerParts(
            config=config,
            folder=folder,
            engine=engine,
            stream=stream,
            eval_batches=(lambda: iter(evals)) if evals is not None else None,
            schedule=self.schedule,
            length=self.length,
            sampler=sampler,
            progress=progress,
            metrics=metrics,
            loggers=loggers,
            warnings=RunWarnings(sampler.describe, drive_gb_per_s=self._links().get("drive_mixed_gb_per_s")),
            watches=(space, MemoryWatch()),
            prompt_ids=sample_prompt(config.sample_prompt, self.data, tokenizer),
            decode=lambda ids: tokenizer.decode(ids),
            end_tokens=end_tokens_of(unwrap(engine.loaded.model), tokenizer),
            best=self._best(),
            keeps_data_position=keeps_data_position,
            tokenizer=tokenizer,
            fingerprint=fingerprint,
            settings=self.changeable,
            made_of={kind: asdict(material) for kind, material in self.made_of.items()},
        )

    def _best(self) -> BestSoFar | None:
        config = self.config
        if not (config.load_best_model_at_end or config.early_stopping_patience):
            return None
        return BestSoFar(config.metric_for_best_model, config.early_stopping_patience, config.early_stopping_threshold)

    def _settle_data(self, fingerprint: dict[str, Any], stream: BatchStream, say: Callable[[str], None]) -> bool:
        """Go on in the data where the checkpoint was; False where it starts anew. DataError or CheckpointError."""
        if self.checkpoint is None:
            return True
        on_purpose = self.config.continue_with_changes
        settle_changes(self.checkpoint, fingerprint, on_purpose=on_purpose)
        try:
            stream.load_state_dict(self.checkpoint.trainer_state()["data"])
        except DataError as error:
            if not on_purpose:
                raise DataError(f"{error}, or add --continue_with_changes to go on with this data") from error
            say("resume: the data, its order or its rows changed: they are read from their beginning")
            return False
        return True

    def _header(self, engine: Engine, sampler: Sampler, end_tokens: list[int]) -> dict[str, Any]:
        """Line 0 of metrics.jsonl."""
        versions = {"outcore": __version__, "torch": torch.__version__, "python": platform.python_version()}
        for name in ("transformers", *["deepspeed"] * (self.decided.name == "deepspeed")):
            versions[name] = version(name)
        return {
            "run": self.folder.name,
            "versions": versions,
            "machine": {
                "host": platform.node(),
                "device": self.device.reason,
                "threads": torch.get_num_threads(),
                **sampler.describe(),
                "links": self._links(),
            },
            "model": {"words": engine.loaded.words, **asdict(engine.loaded.facts), "end_tokens": end_tokens},
            "data": self.data.summary.header(),
            "plan": {
                "total_steps": self.length.total_steps,
                "train_batch_size": self.decided.settings.train_batch_size,
                "engine": self.decided.name,
                "engine_reason": self.decided.reason,
                "forecast": self.forecast.header() if self.forecast else None,
            },
            "config": asdict(self.config),
            "changes": list(self.changes),
        }

    def _links(self) -> dict[str, float]:
        return self.forecast.measured_links() if self.forecast else {}

    def write_plan(self, said: list[str], startup_s: dict[str, float]) -> None:
        """logs/<run>/plan.json: the engine, its settings, the reason of every choice, the planner's forecast."""
        if self.is_main:
            forecast = self.forecast.to_dict() if self.forecast else None
            plan = {**_record_of(self.decided), "said": said, "startup_s": startup_s, "forecast": forecast}
            (self.folder.logs / "plan.json").write_text(json.dumps(plan, indent=1, default=str), encoding="utf-8")


def _record_of(decision: Decision) -> dict[str, Any]:
    """The engine, every resolved value with its reason, what the engine made of them."""
    settings = decision.settings
    plain = {f.name: getattr(settings, f.name) for f in fields(settings) if f.compare}
    nested = {"offload": asdict(settings.offload), "loss_scaling": asdict(settings.loss_scaling)}
    resolved = {"train_batch_size": settings.train_batch_size, **plain, **nested, "reasons": dict(settings.reasons)}
    return {
        "engine": {"name": decision.name, "reason": decision.reason},
        "notes": decision.notes,
        "settings": resolved,
        **decision.record(),
    }


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
    if job.config.method != "sft":
        raise ConfigError(f"--plan: outcore plan MODEL --method {job.config.method} forecasts it.")
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
    below = {}
    if model.model_name_or_path:
        below = began_from(config, model.model_name_or_path, resolve_source(model).config)
    made_of = settle_materials(config, below, planned.tokenizer, taken.checkpoint, job.say)
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
