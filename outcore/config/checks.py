"""All checks of settings against their range and against each other: once, before any download, build or file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outcore.common.files import check_utf8
from outcore.config.convert import ConfigError, typed_value
from outcore.config.fields import FIELDS, ROLLED, EngineFields, TrainConfig
from outcore.config.spec import Field
from outcore.sizing.engine_rule import BELOW_ZERO3, why_not_muon
from outcore.sizing.states import SPLIT_FORMATS

READ_HERE = ("eval_dataset",)
"""Texts that may be a path of any bytes, as those of `dataset` may: only we open it."""

OF_THE_LOOP = (
    *EngineFields.__annotations__, "model_module", "router_loss", "optimizer", "decay_all", "activation_checkpointing",
    "label_smoothing", "neftune_noise_alpha", "deterministic", "sample_steps", "sample_prompt",
    "sample_tokens", "load_best_model_at_end", "metric_for_best_model", "early_stopping_patience",
    "early_stopping_threshold", "metrics_port", "trace", "packing", "group_by_length", "streaming",
)  # fmt: skip
"""Settings of our own loop and its engines, which other methods' trainers have not."""
OF_ANSWERS = (
    "data_format", "messages_column", "long_rows", "as_chat", "train_on_prompt", "train_on_last_turn",
    "text_extensions",
)  # fmt: skip
"""Settings of how answers are laid out in rows, for methods that learn answers."""
OF_EMBED = ("pooling", "matryoshka")
REWARDS = ("math_verify", "code", "code_without_sandbox")
OF_REWARDS = ("reward_function", "on_bad_reward", "reward_timeout_s")
OF_ROLLOUTS = (*OF_REWARDS, "num_generations", "max_completion_length")
TAUGHT = ("distill", "on_policy_distill")
OF_EVALUATION = (
    "eval_dataset", "eval_fraction", "eval_steps", "per_device_eval_batch_size", "max_eval_samples", "text_column",
    "completion_column", "eval_strategy",
)  # fmt: skip
"""Settings of evaluations and of answers in the data, which methods that roll out have not."""
OF_METHODS = ("beta", "teacher", *OF_EMBED, *OF_ROLLOUTS)
"""Settings of methods beside sft alone."""
SHARED = ("deepspeed_config", "local_rank", "fit_check", "compile")


def check_ranges(config: TrainConfig, rows: Mapping[str, Field]) -> None:
    """Raise ConfigError for a number out of its field's range."""
    for name, row in rows.items():
        check_range(row, getattr(config, name))


def check_range(row: Field, value: Any) -> None:
    """Raise ConfigError for a number out of the field's range."""
    if allowed := row.range_problem(value):
        usual = f" {row.spec.usual} is usual." if row.spec.usual else ""
        raise ConfigError(f"{row.name}: must be {allowed}, got {value}.{usual}")


def check_config(config: TrainConfig) -> None:
    """Raise ConfigError for settings that contradict each other, and for names that cannot be."""
    _check_names(config)
    _check_spelling(config)
    _check_length(config)
    check_homes(config)
    _check_losses(config)
    _check_rows(config)
    _check_upload(config)
    _check_method(config)
    if config.continue_with_changes and config.resume_from_checkpoint is None:
        raise ConfigError("continue_with_changes is about resuming: add --resume_from_checkpoint auto.")
    if config.quantize != "none" and config.lora_r == 0:
        raise ConfigError(
            f"quantize {config.quantize} packs what is frozen, and without adapters all of the model is trained: add "
            "--lora_r 16 (or another rank)."
        )


def _check_spelling(config: TrainConfig) -> None:
    for name, value in vars(config).items():
        if isinstance(value, str) and name not in READ_HERE:
            try:
                check_utf8(value, name)
            except ValueError as error:
                raise ConfigError(str(error)) from None


def check_homes(config: TrainConfig) -> None:
    """Raise ConfigError where engine, ZeRO stage and homes contradict each other."""
    _check_engine(config)
    _check_offload(config)
    _check_infinity(config)


def check_said(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for values of fields, by name, that cannot be, alone or together. None: not said."""
    for name, value in values.items():
        if value is not None:
            check_range(FIELDS[name], typed_value(FIELDS[name], value))
    check_stage_of_stream(values.get("engine"), values.get("zero_stage"))
    if values.get("state_format") is not None:
        check_state_format(values["state_format"], values["precision"])


def check_stage_of_stream(engine: str | None, zero_stage: str | None) -> None:
    """Raise ConfigError for a ZeRO stage that the streaming engine is not."""
    if engine == "stream" and zero_stage in BELOW_ZERO3:
        raise ConfigError(
            f"engine stream and zero_stage {zero_stage} contradict each other: the streaming engine offloads every "
            "state (it is ZeRO-Infinity by layers). Use --engine deepspeed, --engine auto or --zero_stage 3."
        )


def check_state_format(name: str, precision: str) -> None:
    """Raise ConfigError for a format of optimizer states that cannot go with the precision."""
    if name in SPLIT_FORMATS and precision != "bf16":
        other = "fp32" if name == "split" else "fp32_m8"
        raise ConfigError(
            f"state_format {name} keeps the master as the bf16 parameter and a residual, so it needs --precision bf16; "
            f"this run computes in {precision}. Use --state_format {other}."
        )


def _check_losses(config: TrainConfig) -> None:
    if config.label_smoothing and config.model_module:
        raise ConfigError("label_smoothing: a model_module brings its own loss: smooth it there, or leave it out.")
    adapters = [n for n in ("lora_alpha", "use_rslora", "use_dora", "lora_modules_to_save") if getattr(config, n)]
    adapters += ["init_lora_weights"] if config.init_lora_weights != "kaiming" else []
    if config.lora_r == 0 and adapters:
        raise ConfigError(
            f"{adapters[0]} is given but lora_r is 0: add --lora_r 16 (or another rank) to train adapters."
        )
    if config.lora_r and not (config.model_name_or_path or config.model_module or config.random_base):
        shape = config.preset or config.config_file or "the default model"
        raise ConfigError(
            f"lora_r: {shape} is a shape, with random weights, over which adapters learn little. Name a trained model "
            "(--model FOLDER or a hub id), leave lora_r out to train all weights, or add --random_base to try it out."
        )


def _check_rows(config: TrainConfig) -> None:
    if config.eval_dataset and config.eval_fraction not in (0, TrainConfig.eval_fraction):
        raise ConfigError(
            "eval_dataset and eval_fraction contradict each other: with data of its own for evaluation nothing is held "
            "out of the training data. Keep one of them."
        )
    if config.group_by_length and config.packing == "on":
        raise ConfigError("group_by_length: packed rows are all of one length. Use --packing off, or leave it out.")


def _check_method(config: TrainConfig) -> None:
    method = config.method
    if method == "sft":
        if given := next((name for name in OF_METHODS if getattr(config, name) is not None), None):
            raise ConfigError(f"{given}: method sft has none. Name the method it is for (--method), or leave it out.")
        return
    rolls_out = method in ROLLED
    refused = {*OF_THE_LOOP, *(OF_ANSWERS if method != "distill" else ()), *(OF_EVALUATION if rolls_out else ())}
    refused -= {*SHARED}
    if given := next(
        (name for name in FIELDS if name in refused and getattr(config, name) not in (FIELDS[name].default, "no")), None
    ):
        raise ConfigError(f"{given}: method {method} has no such setting; it is of --method sft. Leave it out.")
    if given := next((name for name in OF_EMBED if getattr(config, name) is not None and method != "embed"), None):
        raise ConfigError(f"{given}: method {method} makes no vectors; it is of --method embed. Leave it out.")
    _check_rollouts(config, rolls_out)
    if config.beta is not None and method not in ("dpo", "orpo", "kto", "simpo") and not rolls_out:
        raise ConfigError(f"beta: method {method} compares no answers. Leave it out.")
    if (config.teacher is not None) != (method in TAUGHT):
        raise ConfigError(
            f"teacher and the methods {' and '.join(TAUGHT)} go together: --method distill --teacher MODEL."
        )
    if config.quantize != "none" and config.lora_export == "merged" and config.export:
        raise ConfigError(
            f"quantize: method {method} exports the adapter over a packed base: add --lora_export adapter."
        )
    named = config.model_name_or_path or config.tokenizer_name_or_path or config.random_base
    if method in ("embed", "classify") and not named:
        raise ConfigError(
            f"method {method} begins with a trained model: name one (--model), or at least a --tokenizer."
        )


def _check_rollouts(config: TrainConfig, rolls_out: bool) -> None:
    method, reward = config.method, config.reward_function
    if given := next((name for name in OF_ROLLOUTS if getattr(config, name) is not None and not rolls_out), None):
        raise ConfigError(f"{given}: method {method} rolls out no answers; it is of --method grpo. Leave it out.")
    if not rolls_out:
        return
    if method == "on_policy_distill":
        if given := next((name for name in ("beta", *OF_REWARDS) if getattr(config, name) is not None), None):
            raise ConfigError(f"{given}: method {method} has its teacher alone to go by. Leave it out.")
        if str(config.teacher).lower().endswith(".parquet"):
            raise ConfigError(
                f"teacher: {config.teacher} says nothing of answers that are still to come. Name a model, or a server."
            )
        return
    if config.beta is not None and not config.lora_r:
        raise ConfigError(
            f"beta: method {method} compares with the model as it was, which is there with adapters only, switched "
            "off. Add --lora_r 16 (or another rank), or leave beta out."
        )
    file, _, name = (reward or "").rpartition(".py:")
    if reward in (None, *REWARDS) or (name.isidentifier() and Path(f"{file}.py").expanduser().is_file()):
        return
    raise ConfigError(
        f"reward_function: {reward!r} is no FILE.py:NAME with a file that is here, nor one of {', '.join(REWARDS)}."
    )


def _check_upload(config: TrainConfig) -> None:
    if config.push_to_hub is None:
        return
    if config.push_to_hub.count("/") != 1 or not all(config.push_to_hub.split("/")):
        raise ConfigError(f"push_to_hub: expected ORG/NAME (or USER/NAME), got {config.push_to_hub!r}.")
    if not config.export:
        raise ConfigError("push_to_hub uploads the exported model: leave --no_export out.")


def _check_names(config: TrainConfig) -> None:
    sources = [n for n in ("model_name_or_path", "preset", "config_file", "model_module") if getattr(config, n)]
    if len(sources) > 1:
        raise ConfigError(f"{' and '.join(sources)} contradict each other: a run has one model. Keep one of them.")
    name = config.run_name
    if name and (Path(name).name != name or name in (".", "..") or not name.strip() or not name.isprintable()):
        raise ConfigError(f"run_name: must be a plain folder name without slashes, got {name!r}.")


def _check_length(config: TrainConfig) -> None:
    if config.max_steps == 0:
        raise ConfigError("max_steps: must be above 0 (or -1: follow num_train_epochs), got 0.")
    if config.warmup_ratio is not None and config.warmup_steps is not None:
        raise ConfigError("warmup_ratio and warmup_steps contradict each other: keep one of them.")
    if config.lr_decay_ratio is not None and config.lr_scheduler_type != "wsd":
        raise ConfigError("lr_decay_ratio is a setting of the schedule wsd: add --lr_scheduler_type wsd.")
    _check_best(config)
    if config.max_steps > 0 and config.warmup_steps is not None and config.warmup_steps > config.max_steps:
        raise ConfigError(
            f"warmup_steps ({config.warmup_steps}) is more than max_steps ({config.max_steps}): the learning rate "
            "would never reach its peak. Lower warmup_steps, or raise max_steps."
        )


def _check_best(config: TrainConfig) -> None:
    if not (config.load_best_model_at_end or config.early_stopping_patience):
        return
    flag = "load_best_model_at_end" if config.load_best_model_at_end else "early_stopping_patience"
    if config.eval_strategy == "no":
        raise ConfigError(f"{flag} needs evaluations: leave --eval_strategy no out.")
    if config.eval_strategy == "steps" and config.eval_steps == 0:
        raise ConfigError(f"{flag} needs evaluations during the run: --eval_steps above 0, or leave it out.")
    if config.save_strategy == "no":
        raise ConfigError(f"{flag} needs checkpoints, of which the best is kept: leave --save_strategy no out.")
    if config.eval_dataset is None and config.eval_fraction == 0:
        raise ConfigError(f"{flag} needs evaluation data: --eval_dataset FILE, or an --eval_fraction above 0.")


def _check_engine(config: TrainConfig) -> None:
    check_stage_of_stream(config.engine, config.zero_stage)
    if config.optimizer == "muon" and (
        why := why_not_muon(
            engine=config.engine or "auto", is_frozen=config.lora_r > 0, state_format=config.state_format or ""
        )
    ):
        raise ConfigError(why)
    if config.engine == "deepspeed":
        only_stream = [n for n in ("activations", "compile", "tiling") if getattr(config, n) != "auto"]
        only_stream += ["matmul"] if config.matmul != "same" else []
        only_stream += ["quantize"] if config.quantize != "none" else []
        sizes = ("tile_bytes", "resident_gib", "ahead_gib")
        only_stream += [n for n in sizes if getattr(config, n) is not None]
        if only_stream:
            raise ConfigError(
                f"{only_stream[0]} is a setting of the streaming engine: leave it out, or leave out --engine deepspeed."
            )


def _check_offload(config: TrainConfig) -> None:
    stage, optimizer, params = config.zero_stage, config.offload_optimizer, config.offload_params
    if stage == "none" and "nvme" in (optimizer, params):
        raise ConfigError("zero_stage none and offload to nvme contradict each other: use --zero_stage infinity.")
    if stage in BELOW_ZERO3 and params in ("cpu", "nvme"):
        raise ConfigError(
            f"zero_stage {stage} keeps parameters on the GPU: offload_params {params} needs --zero_stage zero3 or "
            "infinity."
        )
    if stage == "none" and optimizer == "cpu":
        raise ConfigError("zero_stage none keeps everything on the GPU: offload_optimizer cpu needs zero1, 2 or 3.")
    if stage in ("zero1", "zero2") and optimizer == "nvme":
        raise ConfigError(
            f"offload_optimizer nvme needs zero_stage zero3 or infinity: with {stage} DeepSpeed would quietly keep the "
            "states in RAM. Use --offload_optimizer cpu or another stage."
        )


def _check_infinity(config: TrainConfig) -> None:
    if config.zero_stage != "infinity":
        return
    for suffix, choice, on_nvme in (
        ("optimizer", config.offload_optimizer, config.nvme_offload_optimizer),
        ("params", config.offload_params, config.nvme_offload_params),
    ):
        if on_nvme and choice in ("none", "cpu"):
            raise ConfigError(
                f"zero_stage infinity with nvme_offload_{suffix} and offload_{suffix} {choice} contradict each other. "
                f"Add --nvme_offload_{suffix} false, or leave offload_{suffix} out."
            )
        if not on_nvme and choice == "nvme":
            raise ConfigError(
                f"nvme_offload_{suffix} false and offload_{suffix} nvme contradict each other. Leave one of them out."
            )
