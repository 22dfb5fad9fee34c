"""Flags of `outcore plan`: those of a training run, and a machine and outputs of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from outcore.common.words import own_command
from outcore.config import ConfigError, TrainConfig, fields_of, parse, setting
from outcore.model import PRESETS, named_model

PROG = "outcore plan"
DESCRIPTION = (
    "Will this model fit, how fast will it be, what limits it. Weights are never loaded; what is left out is chosen. "
    "Takes the flags of outcore train, whose --plan asks the same of one run as it is. Exit codes: 0 the plan fits, "
    "1 it does not, 2 wrong usage or a missing, stale or damaged profile."
)


@dataclass(frozen=True)
class MachineFields:
    """The machine, instead of what its profile says."""

    machine: str | None = setting(None, common=True)
    """Profile name or file. Default: this machine as gds_optimizer.py measured it."""
    nominal: bool = setting(False, common=True)
    """Data-sheet rates where nothing was measured."""
    vram_gib: float | None = setting(None, above=0, common=True)
    """GiB of the GPU's memory."""
    ram_gib: float | None = setting(None, above=0, common=True)
    """GiB of RAM that the run may take."""
    pinned_gib: float | None = setting(None, least=0)
    """GiB that can be page-locked."""
    nvme_free_gb: float | None = setting(None, least=0, common=True)
    """GB free on the drive."""
    tflops: float | None = setting(None, above=0)
    """TFLOPS that the GPU reaches with compiled layers."""
    num_gpus: int = setting(1, above=0, common=True)
    """GPUs of the run."""
    checkpoints_elsewhere: bool = setting(False, common=True)
    """Checkpoints go to another drive than the states."""


SOURCES = ("model_name_or_path", "preset", "config_file")
"""Fields that name a model, of which the planner counts the layers."""
NAMED_ELSEWHERE = "-"
"""Value that `--infer` alone stands for: another flag names the model."""
AIMS = ("balanced", "latency", "throughput")
"""Values of `--aim`, which was called --preset; without `--infer` a preset is a model's shape."""


@dataclass(frozen=True)
class InferFields:
    """Answers instead of training."""

    infer: str | None = setting(None, bare=NAMED_ELSEWHERE, common=True)
    """Plan generating and serving, of this model or of --model's; --aim says what for."""
    aim: Literal["balanced", "latency", "throughput"] = setting("balanced", common=True)
    """Aim of answers: latency is one reader (as outcore chat), balanced many (as outcore serve)."""
    infer_quantize: Literal["none", "int8", "nf4"] = "none"
    """Format of packed weights for answers: --quantize means this beside --infer."""
    context: int | None = setting(None, above=0)
    """Tokens of prompt and answer together."""
    kv_format: Literal["same", "int8"] = "same"
    """Format of kept keys and values: int8, or the same as the model computes in."""
    cpu_tokens: int | None = setting(None, least=0)
    """Tokens of a pass up to which the CPU may compute layers in RAM, at the rates of this machine's last start."""
    expert_cache_gib: float | None = setting(None, least=0)
    """Memory of the device for a mixture's experts, which come as they are chosen; 0: with their layers."""


WITH_INFER = frozenset(
    {
        *(*SOURCES, "trust_remote_code", "precision", "ram_budget_gib"),
        *("machine", "nominal", "vram_gib", "ram_gib", "nvme_free_gb", "tflops", "json"),
    }
)
"""Fields of a training run, of machine and output that say something beside `--infer`."""


@dataclass(frozen=True)
class OutputFields:
    """Output."""

    json: bool = setting(False, common=True)
    """The answer as JSON on stdout."""
    upgrade: bool = setting(False, common=True)
    """Which purchase (a second drive, RAM, a card) halves the step."""
    efficiency: bool = False
    """Efficiency by the ZeRO-Infinity paper's formulas with this machine's rates, by tokens a step; needs no model."""


@dataclass(frozen=True)
class PlanConfig(OutputFields, InferFields, MachineFields, TrainConfig):
    """Settings of `outcore plan`."""

    UNSHOWN: ClassVar[frozenset[str]] = frozenset(
        {
            *("eval_dataset", "learning_rate", "run_name", "save_steps", "load_best_model_at_end"),
            *("early_stopping_patience", "resume_from_checkpoint", "continue_with_changes", "checkpoint_dir"),
            *("report_to", "plan", "deepspeed_config"),
        }
    )
    """Settings of a run that its forecast does not depend on: taken, and not in the short help."""
    random_base: bool = True
    """Adapters are planned over any shape; the command that makes the plan a run says so."""


def parse_plan(argv: list[str] | None) -> PlanConfig:
    """Checked settings of a plan. ConfigError for what cannot be, or cannot be planned."""
    args = sys.argv[1:] if argv is None else list(argv)
    if any(arg.partition("=")[0] == "--infer" for arg in args):
        for i, arg in enumerate(args):
            flag, equals, said = arg.partition("=")
            value = said or (args[i + 1] if i + 1 < len(args) else "")
            if flag == "--preset" and value in AIMS:
                args[i] = "--aim" + equals + said
            elif flag == "--quantize":
                args[i] = "--infer_quantize" + equals + said
    return check_planned(parse(args, PlanConfig, PROG, DESCRIPTION, named_model))


def check_planned(config: PlanConfig) -> PlanConfig:
    """The settings. ConfigError for what says nothing here, or cannot be planned."""
    _check_idle(config)
    if config.infer is not None:
        config = replace(config, infer=named_model(config.infer)[1])
    if config.lora_r == 0 and config.lora_target_modules != "auto":
        raise ConfigError("lora_target_modules is given but lora_r is 0: add --lora_r 16 to plan adapters.")
    if config.model_module is not None:
        raise ConfigError("model_module: the planner cannot count a model that only its own builder knows.")
    if config.deepspeed_config != PlanConfig.deepspeed_config:
        raise ConfigError(
            "deepspeed_config: outcore plan chooses what is left open; a run with this file is planned by "
            f"{own_command('train')} --plan with the same flags."
        )
    return config


def _check_idle(config: PlanConfig) -> None:
    """ConfigError for a setting that would change nothing, with or without `--infer`."""
    rows = fields_of(PlanConfig)
    said = [name for name, row in rows.items() if getattr(config, name) != row.default]
    answers = {name for name, row in rows.items() if row.group == fields_of(InferFields)["infer"].group}
    if config.infer is None:
        if idle := next((name for name in said if name in answers), None):
            raise ConfigError(f"{idle.removeprefix('infer_')} is about answers: add --infer, or leave it out.")
        return
    if idle := next((name for name in said if name not in answers | WITH_INFER), None):
        raise ConfigError(
            f"{idle} changes nothing beside --infer, which plans answers of a model and no training: leave it out, or "
            "leave out --infer."
        )
    named = [name for name in SOURCES if name in said]
    if config.infer != NAMED_ELSEWHERE and named:
        other = getattr(config, named[0])
        is_aim = named[0] == "preset" and other not in PRESETS
        aims = f" What answers aim at is --aim {', '.join(AIMS)}." if is_aim else ""
        raise ConfigError(f"--infer {config.infer} names a model, and {named[0]} {other} another. Keep one.{aims}")
