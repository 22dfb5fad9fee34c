"""From the one training configuration to each room's settings, and what is chosen where the user left it open."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outcore.common.classes import same_named
from outcore.common.quantities import counted
from outcore.common.words import did_you_mean, names_of
from outcore.config import ConfigError, DeepSpeedFile, Precision, TrainConfig, recomputes
from outcore.machine import detect_cpu
from outcore.model import LoraSettings, ModelSettings
from outcore.train.configure.schedule import COSINE_FLOOR, WSD_DECAY_SHARE, LrSchedule, RunLength

EMBEDDED_STEPS = 150
"""Length of the embedded default's run: a visible fall of the loss in a few minutes on two CPU cores."""
TINY_SEQ_LENGTH = 256
DEFAULT_SEQ_LENGTH = 1024
BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Names of CPUs' instructions that multiply in bf16, on x86 and on ARM."""


@dataclass(frozen=True)
class ComputeDevice:
    """Device and precision that this process computes with, and why."""

    has_cuda: bool
    precision: Precision
    reason: str


def choose_device(config: TrainConfig) -> ComputeDevice:
    """Device and precision, with the reason; ConfigError for a precision the GPU does not have."""
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        has_bf16 = torch.cuda.get_device_capability()[0] >= 8
        name = torch.cuda.get_device_name()
        if config.precision == "bf16" and not has_bf16:
            raise ConfigError(f"precision bf16: {name} has no bf16 units (Ampere and later do). Use --precision fp16.")
        if config.precision == "auto":
            chosen = "bf16" if has_bf16 else "fp16"
            why = "has bf16 units" if has_bf16 else "has no bf16 units: fp16 with loss scaling"
            return ComputeDevice(True, chosen, f"{name} {why}")
        return ComputeDevice(True, config.precision, f"{name}, as asked")
    words = "no CUDA GPU found: training on the CPU"
    if config.precision == "fp16":
        raise ConfigError("precision fp16 needs a GPU: on the CPU use --precision bf16 or fp32.")
    if config.precision == "auto":
        return ComputeDevice(False, "fp32", f"{words} in fp32 (fastest there for small models)")
    slow = config.precision == "bf16" and not BF16_UNITS.intersection(detect_cpu(Path("/")).simd)
    but = "; this CPU has no bf16 units, so its products take several times longer than with --precision fp32"
    return ComputeDevice(False, config.precision, f"{words} in {config.precision}, as asked{but * slow}")


def lora_alpha(config: TrainConfig) -> float:
    """Scale of the adapters; 0 without LoRA."""
    return float(config.lora_alpha or 2 * config.lora_r)


def model_settings_of(config: TrainConfig, precision: str, seq_length: int) -> ModelSettings:
    """The model room's settings."""
    is_named = config.model_name_or_path or config.config_file or config.model_module
    lora = None
    if config.lora_r:
        lora = LoraSettings(
            r=config.lora_r,
            alpha=lora_alpha(config),
            dropout=config.lora_dropout,
            target_modules=config.lora_target_modules,
            modules_to_save=names_of(config.lora_modules_to_save),
            use_dora=config.use_dora,
            use_rslora=config.use_rslora,
            init=config.init_lora_weights,
        )
    said = {
        **same_named(ModelSettings, config, "vocab_size", "lora", "gradient_checkpointing"),
        "model_name_or_path": _absolute(config.model_name_or_path),
        "preset": config.preset or (None if is_named else "tiny"),
        "precision": precision,
        "seq_length": seq_length,
        "lora": lora,
        "quantize": None if config.quantize == "none" else config.quantize,
        "gradient_checkpointing": recomputes(config),
        "config_overrides": _overrides(config.config_overrides),
    }
    return ModelSettings(**said)


def _absolute(name: str | None) -> str | None:
    """A folder's whole path: an adapter names its base by it, and is loaded from anywhere."""
    folder = Path(name).expanduser() if name else None
    return str(folder.absolute()) if folder is not None and folder.is_dir() else name


def _overrides(text: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(
            f"config_overrides: not JSON ({error}). An example: '{{\"num_hidden_layers\": 4}}'."
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"config_overrides: expected fields and their values ({{...}}), got {text!r}.")
    return fields


SHAPES = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}
"""Names that differ from another in a default only -> the other."""


def schedule_of(config: TrainConfig, file: DeepSpeedFile, peak_lr: float, total_steps: int) -> LrSchedule:
    """Flags first, then the scheduler block of deepspeed_config.json, then the defaults."""
    of_file = file.values.get("lr_scheduler_type", "warmup_decay")
    kind = config.lr_scheduler_type or of_file
    params = dict(file.get("scheduler.params", {})) if kind == of_file else {}
    from_file = params.pop("warmup_num_steps", None)
    ratio = config.warmup_ratio
    of_ratio = None if ratio is None else math.ceil(ratio * total_steps)
    default = 0 if kind == "constant" else min(100, int(0.03 * total_steps))
    warmup = next(n for n in (config.warmup_steps, of_ratio, from_file, default) if n is not None)
    if warmup > total_steps:
        name = "scheduler.params.warmup_num_steps" if config.warmup_steps is None else "warmup_steps"
        raise ConfigError(
            f"{name} ({warmup}) is more than the run's {counted(total_steps, 'step')}: the learning rate would never "
            f"reach its peak. Lower {name}, or train longer (max_steps, num_train_epochs)."
        )
    default_floor = COSINE_FLOOR if kind == "cosine_with_min_lr" else 0.0
    floors = (config.min_lr_ratio, params.pop("cos_min_ratio", None), default_floor)
    share = config.lr_decay_ratio or WSD_DECAY_SHARE
    schedule = LrSchedule(
        SHAPES.get(kind, kind),
        peak_lr,
        warmup,
        total_steps,
        next(floor for floor in floors if floor is not None),
        min(total_steps - warmup, math.ceil(share * total_steps)) if kind == "wsd" else 0,
        first=int(config.warmup_steps is None and of_ratio is None and from_file is not None),
    )
    _check_scheduler_params(params, schedule, file.path)
    return schedule


def _check_scheduler_params(params: dict[str, Any], schedule: LrSchedule, file: str) -> None:
    """ConfigError when the file's scheduler asks for another rate than the run's own schedule gives."""
    ours: dict[str, tuple[Any, str]] = {
        "warmup_max_lr": (schedule.peak_lr, "--learning_rate, or optimizer.params.lr"),
        "total_num_steps": (schedule.total_steps, "--max_steps or --num_train_epochs"),
        "warmup_min_lr": (0, "nothing"),
        "warmup_min_ratio": (0, "nothing"),
        "warmup_type": ("linear", "nothing"),
        "last_batch_iteration": (-1, "--resume_from_checkpoint"),
    }
    for name, value in params.items():
        if name not in ours:
            raise ConfigError(
                f"{file}: there is no key scheduler.params.{name}.{did_you_mean(name, (*ours, 'warmup_num_steps'), 1)}"
            )
        here, by = ours[name]
        if value != here:
            raise ConfigError(
                f"{file}: scheduler.params.{name} is {value!r}, but this run's is {here!r}, which {by} changes. "
                "Delete the key, or make them equal."
            )


def epoch_words(config: TrainConfig, rows: int, step_rows: int) -> str:
    """Tell what becomes of rows that an epoch leaves over, where epochs set the run's length; '' where none is left."""
    is_embedded = config.dataset == ("embedded",) and config.num_train_epochs == 1.0
    if config.max_steps > 0 or is_embedded or not rows % step_rows:
        return ""
    total, theirs = (math.ceil(config.num_train_epochs * n) for n in (rows / step_rows, math.ceil(rows / step_rows)))
    of_them = f", {theirs:,} steps in all" if theirs != total else ""
    return (
        f"epochs: {config.num_train_epochs:g} x {rows:,} rows are {total:,} steps of {step_rows:,}: the last step of "
        f"an epoch is filled up from the next, where Hugging Face's Trainer takes a smaller one{of_them}"
    )


SHORT_STEPS = 10
"""Steps between evaluations at least, where nobody says: a run of fewer evaluates at its end alone."""


def run_length(config: TrainConfig, rows: int, step_rows: int, accumulation: int) -> RunLength:
    """Count the steps, and choose when to evaluate, sample and save; the same however `step_rows`, the rows of a step
    on all ranks, are cut into micro-batches. `rows`: of the data."""
    epoch = max(1, math.ceil(rows / step_rows))
    if config.max_steps > 0:
        total = config.max_steps
    elif config.dataset == ("embedded",) and config.num_train_epochs == 1.0:
        total = EMBEDDED_STEPS
    else:
        total = max(1, math.ceil(rows * config.num_train_epochs / step_rows))
    fifth = max(1, total // 5)
    rarely = max(SHORT_STEPS, fifth) if config.eval_steps is None else config.eval_steps
    every_eval = epoch if config.eval_strategy == "epoch" else rarely
    every_save = epoch if config.save_strategy == "epoch" else fifth if config.save_steps is None else config.save_steps
    every_sample = every_eval if config.sample_steps is None else config.sample_steps
    return RunLength(total, every_eval, every_sample, every_save, accumulation)
