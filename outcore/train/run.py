"""From a checked configuration to a finished run: assemble data, engine and loop, and say what was chosen and why."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from outcore import __version__
from outcore.data import BatchStream, EvalStream, PreparedData, load_or_train_tokenizer, prepare_data
from outcore.engine.deepspeed.build import Resolved, build_engine, init_process_group, resolve
from outcore.engine.deepspeed.engine import DeepSpeedEngine
from outcore.engine.deepspeed.settings import BuiltConfig, RunFacts
from outcore.engine.deepspeed.user_file import read_user_config
from outcore.engine.stream.engine import StreamEngine
from outcore.model.check import check_abilities
from outcore.model.load import LoadedModel
from outcore.model.settings import ModelSettings
from outcore.model.source import max_positions, resolve_source
from outcore.monitor import MetricsLog, Progress, Sampler
from outcore.monitor.loggers import make_loggers
from outcore.monitor.memory_watch import MemoryWatch
from outcore.monitor.metrics_server import MetricsServer
from outcore.monitor.run_warnings import RunWarnings
from outcore.monitor.sleep_hold import hold_off_sleep
from outcore.monitor.space_watch import SpaceWatch
from outcore.train.arguments import ConfigError, parse_config
from outcore.train.checkpoint import SPACE_MARGIN_BYTES, Checkpoint, check_same_run
from outcore.train.config import TrainConfig
from outcore.train.engines import build_streaming, check_trace, choose_engine, start_trace
from outcore.train.forecast import Forecast, Forecaster
from outcore.train.loop import RunLength, Trainer, TrainerParts
from outcore.train.memory_advice import explain
from outcore.train.random_state import seed_everything
from outcore.train.run_folder import RunFolder, choose_run
from outcore.train.schedule import LrSchedule
from outcore.train.settings import (
    DEFAULT_SEQ_LENGTH,
    TINY_SEQ_LENGTH,
    choose_hardware,
    data_settings_of,
    deepspeed_settings_of,
    default_lr,
    is_tiny,
    model_settings_of,
    run_length,
    schedule_of,
)
from outcore.train.stop_request import StopRequest
from outcore.train.vocabulary import check_token_ids, embedding_rows
from outcore.units import format_count, format_s

AnyEngine = DeepSpeedEngine | StreamEngine


class Run:
    """One training run, assembled step by step; `main` is the whole story."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.hardware = choose_hardware(config)
        self.is_main = True
        self.micro_batch_size = config.per_device_train_batch_size or 1
        self.opened = ExitStack()
        """What must be closed, also when assembling the rest fails; in reverse order."""
        self._said: list[str] = []
        self.forecast = Forecast(None, None, "")
        """What the planner says of this run, once its engine is there."""

    def say(self, line: str) -> None:
        """A line on the screen, from rank 0 only."""
        self._said.append(line)
        if self.is_main:
            print(line, flush=True)

    def main(self) -> int:
        """Train, evaluate, save, export; the process's exit code."""
        config, started_s = self.config, time.perf_counter()
        user_config = read_user_config(config.deepspeed_config)
        init_process_group(self.hardware.has_cuda, config.local_rank)
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.is_main = rank == 0
        self.say(f"device: {self.hardware.reason}; {world_size} process{'es' if world_size > 1 else ''}")
        self.choice = choose_engine(config, user_config, world_size)
        self.say(f"engine: {self.choice.name} ({self.choice.reason})")
        check_trace(config, self.choice)
        seq_length = config.seq_length or self._default_seq_length()
        settings = model_settings_of(config, self.hardware.precision, seq_length)
        if settings.model_module is None:
            resolve_source(settings)  # a wrong name or folder is told before anything is made, read or built
        folder, checkpoint = choose_run(config, self.say)
        if self.is_main:
            folder.make()
        seed_everything(config.seed)
        if config.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)

        tokenizer = self._tokenizer(settings)
        resolved, loaded = self._resolve(user_config, settings, tokenizer, world_size, folder.name)
        built = resolved.built
        self.micro_batch_size = built.config["train_micro_batch_size_per_gpu"]
        data = self._data(settings, tokenizer, seq_length, loaded)
        length = run_length(
            config,
            self._batches_per_epoch(data.train, built.config, world_size),
            built.config["gradient_accumulation_steps"],
        )
        schedule = schedule_of(config, user_config, built.config["optimizer"]["params"]["lr"], length.total_steps)
        if checkpoint is not None:
            check_same_run(checkpoint, self._fingerprint(schedule, built.config))
        forecaster = Forecaster(settings, tokenizer, has_cuda=self.hardware.has_cuda, num_gpus=world_size)
        with self.opened:
            if self.hardware.has_cuda and self.is_main:
                hold = self.opened.enter_context(hold_off_sleep(f"outcore run {folder.name}"))
                if not hold.held:
                    self.say(f"sleep: {hold.words}")
            if self.choice.name == "stream":
                engine: AnyEngine = build_streaming(
                    settings, tokenizer, built.config, loaded, has_cuda=self.hardware.has_cuda, say=self.say
                )
                steps_done = checkpoint.step if checkpoint else 0
                start_trace(engine, config, folder.logs, steps_done, length.total_steps, self.say)
            else:
                engine = build_engine(resolved, settings, tokenizer, loaded, say=self.say)
            self.opened.callback(engine.close)
            stream = engine.settings if isinstance(engine, StreamEngine) else None
            self.forecast = forecaster.of(built.config, config.save_total_limit, stream=stream, offload=built.offload)
            if self.forecast.problem:
                self.say(self.forecast.problem)
            parts = self._parts(
                folder, engine, data, tokenizer, schedule, length, built.config, checkpoint, built.offload.nvme_path
            )
            self.opened.callback(parts.progress.close)
            self._write_plan(folder, built, engine)
            return self._train(Trainer(parts), checkpoint, started_s, tokenizer)

    # --- assembling

    def _default_seq_length(self) -> int:
        config = self.config
        if is_tiny(config):
            return TINY_SEQ_LENGTH
        if config.model_module:
            return DEFAULT_SEQ_LENGTH
        probe = model_settings_of(config, self.hardware.precision, 2)
        limit = max_positions(resolve_source(probe).config)
        return min(DEFAULT_SEQ_LENGTH, limit or DEFAULT_SEQ_LENGTH)

    def _tokenizer(self, settings: ModelSettings) -> Any:
        return load_or_train_tokenizer(
            data_settings_of(self.config, settings.seq_length, "auto"),
            self.config.tokenizer_name_or_path or settings.model_name_or_path,
            trust_remote_code=self.config.trust_remote_code,
            say=self.say,
        )

    def _data(
        self, settings: ModelSettings, tokenizer: Any, seq_length: int, loaded: LoadedModel | None
    ) -> PreparedData:
        config = self.config
        model_config = loaded.config if loaded is not None else None
        encoder_decoder, packing = False, config.packing
        if settings.model_module is None:
            source = resolve_source(settings, tokenizer)
            model_config = source.config
            encoder_decoder = source.is_encoder_decoder
            abilities = check_abilities(source.config, config.attn_implementation)
            reason = "an encoder-decoder reads one document per row" if encoder_decoder else abilities.packing_reason
            allowed = abilities.packing and not encoder_decoder
        else:
            allowed, reason = packing == "on", "an own model is not known to keep documents apart"
        if not allowed and packing == "on":
            raise ConfigError(f"packing on: not with this model ({reason}). Use --packing off.")
        if not allowed:
            self.say(f"packing: off ({reason})")
        data = prepare_data(
            data_settings_of(config, seq_length, packing),
            tokenizer,
            encoder_decoder=encoder_decoder,
            packing_allowed=allowed,
            say=self.say,
        )
        check_token_ids(data.summary.max_token_id, embedding_rows(loaded.model if loaded else None, model_config))
        for line in data.summary.lines():
            self.say(line)
        if self.is_main and data.sample_text:
            self.say(f"first sample, loss on the marked part:\n{data.sample_text}")
        return data

    def _batches_per_epoch(self, train: Any, built: dict[str, Any], world_size: int) -> int:
        return math.ceil(len(train) / (built["train_micro_batch_size_per_gpu"] * world_size))

    def _resolve(
        self, user_config: dict[str, Any], settings: ModelSettings, tokenizer: Any, world_size: int, run_name: str
    ) -> tuple[Resolved, LoadedModel | None]:
        """Rank 0 decides (free space and drives are looked at once); the others follow."""
        config = self.config
        file_lr = (user_config.get("optimizer") or {}).get("params", {}).get("lr", "auto")
        learning_rate = config.learning_rate
        if learning_rate is None and file_lr == "auto":
            learning_rate = default_lr(config)
        run = RunFacts(
            world_size=world_size,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world_size))),
            device="cuda" if self.hardware.has_cuda else "cpu",
            precision=self.hardware.precision,  # pyright: ignore[reportArgumentType]
            micro_batch_size=config.per_device_train_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            learning_rate=learning_rate,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_epsilon=config.adam_epsilon,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            lr_scheduler_type="none",
            run_name=run_name,
            ram_available_bytes=psutil.virtual_memory().available,
        )
        try:
            resolved, loaded = resolve(user_config, deepspeed_settings_of(config), settings, run, tokenizer)
        except ValueError as error:
            if not str(error).startswith("deepspeed_config.json:"):
                raise
            words = str(error).removeprefix("deepspeed_config.json")
            raise ConfigError(f"{config.deepspeed_config}{words}") from error
        if world_size > 1:
            shared = [resolved.built]
            torch.distributed.broadcast_object_list(shared, src=0)
            resolved = Resolved(shared[0], resolved.model, resolved.run)
        slow_drive = [note for note in resolved.built.notes if "Warning:" in note]
        for warning in dict.fromkeys([*resolved.built.warnings, *slow_drive]):
            self.say(f"WARNING: {warning}")
        offload = resolved.built.offload
        homes = {"none": "on the device", "cpu": "in RAM", "nvme": f"on NVMe ({offload.nvme_path})"}
        if self.choice.name == "deepspeed":
            self.say(
                f"engine: ZeRO stage {offload.stage}, optimizer states {homes[offload.optimizer]}, "
                f"parameters {homes[offload.params]}"
            )
        return resolved, loaded

    def _parts(
        self,
        folder: RunFolder,
        engine: AnyEngine,
        data: PreparedData,
        tokenizer: Any,
        schedule: LrSchedule,
        length: RunLength,
        built: dict[str, Any],
        checkpoint: Checkpoint | None,
        nvme_state_path: str | None,
    ) -> TrainerParts:
        config = self.config
        micro = built["train_micro_batch_size_per_gpu"]
        eval_micro = config.per_device_eval_batch_size or micro
        stream = BatchStream(data.train, micro, engine.rank, engine.world_size, seed=config.seed)
        evals = None
        if data.eval is not None:
            evals = EvalStream(data.eval, eval_micro, engine.rank, engine.world_size)
        gpu = str(torch.cuda.get_device_properties(engine.device).uuid) if self.hardware.has_cuda else None
        sampler = Sampler(nvme_state_path or folder.checkpoints, gpu=gpu).start()
        self.opened.callback(sampler.close)
        first_step = checkpoint.step if checkpoint else 0
        resume_step = checkpoint.step if checkpoint else None
        loggers = make_loggers(
            config.report_to, folder.logs, resume_step=resume_step, enabled=self.is_main, say=self.say
        )
        self.opened.callback(loggers.close)
        if config.metrics_port is not None and self.is_main:
            loggers.add("metrics server", MetricsServer(config.metrics_port, run=folder.name, say=self.say))
        metrics = None
        if self.is_main:
            header = self._header(folder, engine, built, length, sampler)
            metrics = MetricsLog(folder.metrics, resume_step=resume_step)
            self.opened.callback(metrics.close)
            metrics.write_header(header)
            loggers.log_header(header)
        watched = [folder.checkpoints, folder.logs, folder.export.parent]
        if nvme_state_path is not None:
            watched.append(Path(nvme_state_path))
        space = SpaceWatch(watched, max(SPACE_RESERVE_BYTES, engine.state_bytes() + SPACE_MARGIN_BYTES))
        memory = MemoryWatch()
        return TrainerParts(
            config=config,
            folder=folder,
            engine=engine,
            stream=stream,
            eval_batches=(lambda: iter(evals)) if evals is not None else None,
            schedule=schedule,
            length=length,
            sampler=sampler,
            progress=Progress(
                length.total_steps,
                first_step=first_step,
                plain_every_steps=config.logging_steps,
                limits=sampler.describe(),
                enabled=self.is_main,
            ),
            metrics=metrics,
            loggers=loggers,
            warnings=RunWarnings(sampler.describe),
            watches=(space, memory),
            prompt_ids=tokenizer(config.sample_prompt or DEFAULT_PROMPT)["input_ids"],
            decode=lambda ids: tokenizer.decode(ids),
            eos_token_id=tokenizer.eos_token_id,
            fingerprint={
                "parameters": engine.loaded.facts.total_params,
                **self._fingerprint(schedule, built),
            },
        )

    def _fingerprint(self, schedule: LrSchedule, built: dict[str, Any]) -> dict[str, Any]:
        """What must be the same for a resumed run to be the same run, and is known before the model is loaded."""
        return {
            "precision": self.hardware.precision,
            "train_batch_size": built["train_batch_size"],
            "lora_r": self.config.lora_r,
            "seed": self.config.seed,
            "schedule": asdict(schedule),
        }

    def _header(
        self, folder: RunFolder, engine: AnyEngine, built: dict[str, Any], length: RunLength, sampler: Sampler
    ) -> dict[str, Any]:
        import deepspeed
        import transformers

        versions = {"outcore": __version__, "torch": torch.__version__, "deepspeed": deepspeed.__version__}
        versions |= {"transformers": transformers.__version__, "python": platform.python_version()}
        return {
            "run": folder.name,
            "versions": versions,
            "machine": {"host": platform.node(), "device": self.hardware.reason, **sampler.describe()},
            "model": {"words": engine.loaded.words, **asdict(engine.loaded.facts)},
            "plan": {
                "total_steps": length.total_steps,
                "train_batch_size": built["train_batch_size"],
                "forecast": self.forecast.header(),
            },
            "config": asdict(self.config),
        }

    def _write_plan(self, folder: RunFolder, built: BuiltConfig, engine: AnyEngine) -> None:
        """logs/<run>/plan.json: the resolved configuration, the reason of every choice, and the planner's forecast."""
        if not self.is_main:
            return
        plan = {"deepspeed": built.config, "offload": asdict(built.offload), "notes": built.notes, "said": self._said}
        plan["forecast"] = self.forecast.to_dict()
        (folder.logs / "plan.json").write_text(json.dumps(plan, indent=1, default=str), encoding="utf-8")
        facts = engine.loaded.facts
        self.say(
            f"model: {engine.loaded.words}: {format_count(facts.total_params)} parameters"
            + (
                f", {format_count(facts.trainable_params)} trainable"
                if facts.trainable_params < facts.total_params
                else ""
            )
        )

    # --- training

    def _train(self, trainer: Trainer, checkpoint: Checkpoint | None, started_s: float, tokenizer: Any) -> int:
        parts, folder = trainer.parts, trainer.parts.folder
        if checkpoint is not None:
            trainer.resume(checkpoint)
            self.say(f"resumed from {checkpoint.path} at step {trainer.step}")
        with StopRequest(parts.engine.world_size, parts.engine.device) as stop:
            finished = trainer.run(stop)
        parts.progress.close()
        if not finished:
            saved = "saved. Go on with the same command and --resume_from_checkpoint auto"
            if trainer.saved_step != trainer.step:
                saved = "not saved (save_strategy no)"
            self.say(f"stopped at step {trainer.step} of {parts.length.total_steps} and {saved}")
            return stop.exit_code
        if self.config.export:
            parts.engine.export(folder.export, tokenizer, adapter_only=self.config.lora_export == "adapter")
        trainer.plot()
        self._summary(trainer, time.perf_counter() - started_s)
        return 0

    def _summary(self, trainer: Trainer, seconds: float) -> None:
        folder, evals = trainer.parts.folder, trainer.last_eval
        words = f"done: {trainer.step} steps in {format_s(seconds)}"
        if trainer.first_loss is not None and trainer.last_loss is not None:
            words += f"; loss {trainer.first_loss:.3f} -> {trainer.last_loss:.3f}"
        if evals:
            words += f"; validation loss {evals['eval_loss']:.3f}, perplexity {evals['eval_perplexity']:.2f}"
        self.say(words)
        self.say(f"log and loss curve: {folder.logs}")
        self.say(f"checkpoints:        {folder.checkpoints}")
        if self.config.export:
            self.say(f"model:              {folder.export}  (AutoModelForCausalLM.from_pretrained loads it)")


DEFAULT_PROMPT = "def "
SPACE_RESERVE_BYTES = 1 << 30
"""Free space below which a run saves and stops: a drive that fills up takes the whole system with it."""


def main(argv: list[str] | None = None) -> int:
    """Entry of train_model.py: parse, run, and turn failures into one clear paragraph and an exit code.

    0 done; 1 the run failed (checkpoints intact); 2 wrong input; 128 + signal when stopped and saved.
    """
    run: Run | None = None
    try:
        run = Run(parse_config(argv))
        return run.main()
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        full = explain(error, run.config, run.micro_batch_size) if run is not None else None
        if full is not None:
            error = full
        elif not _raised_by_us(error):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("stopped at once; the last checkpoint is intact (--resume_from_checkpoint auto)", file=sys.stderr)
        return 130


def _raised_by_us(error: BaseException) -> bool:
    """True when the message was written here for people; an error from a library shows its traceback as well."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])
