"""Which engine trains this run, and why: the rule, what the files and flags ask for, and what the model itself says.

`auto` streams a decoder-only model on one process (`outcore.sizing.engine_rule`); what the streaming engine cannot do
goes to DeepSpeed, with the reason in words. `--engine stream` where it cannot is a ConfigError with the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outcore.config import ConfigError, TrainConfig
from outcore.engine.deepspeed.settings import normalize_stage
from outcore.engine.stream.check.gradients import why_config_not_trained, why_not_trained
from outcore.model.facts import resolve_attention
from outcore.model.load import LoadedModel
from outcore.model.settings import ModelSettings
from outcore.model.source import resolve_source
from outcore.optim.formats import state_format
from outcore.sizing.engine_rule import why_not_stream


@dataclass(frozen=True)
class EngineChoice:
    """The engine's name and the reason in words."""

    name: str
    reason: str
    is_auto: bool = False

    def give_way(self, why: str) -> EngineChoice:
        """DeepSpeed instead of the streaming engine; ConfigError when the user asked for the latter."""
        if not self.is_auto:
            raise ConfigError(
                f"engine stream cannot train this run: {why}. Use --engine deepspeed, or --engine auto, which chooses."
            )
        return EngineChoice("deepspeed", f"auto; the streaming engine cannot train this run: {why}", is_auto=True)


def choose_engine(
    config: TrainConfig, user_config: Mapping[str, Any], num_processes: int, precision: str
) -> EngineChoice:
    """`--engine` first, then deepspeed_config.json's outcore block, then auto; the model is asked by `ask_model`.

    ConfigError for what cannot be.
    """
    wanted = config.engine or _block(user_config, "outcore").get("engine", "auto")
    if wanted == "deepspeed":
        return EngineChoice("deepspeed", "as asked")
    if wanted == "stream":
        choice = EngineChoice("stream", "as asked")
    else:
        choice = EngineChoice("stream", "auto: one process and a decoder-only model", is_auto=True)
    why = why_not_stream(num_processes, _stage(config, user_config)) or _only_in_deepspeed(user_config, precision)
    return choice.give_way(why) if why else choice


def ask_model(
    choice: EngineChoice, settings: ModelSettings, tokenizer: Any, loaded: LoadedModel | None
) -> EngineChoice:
    """The choice after a tiny copy of the model was tried; costs a fraction of a second and reads no weights.

    `loaded`: a model_module's own model, which is there already.
    """
    if choice.name != "stream":
        return choice
    if loaded is not None:
        why = why_not_trained(loaded)
    else:
        source = resolve_source(settings, tokenizer)
        attention, _ = resolve_attention(source.config, settings.attn_implementation)
        trust, is_trained = settings.trust_remote_code, source.path is not None
        why = why_config_not_trained(source.config, attention, trust, settings.dtype, trained=is_trained)
    return choice.give_way(why) if why else choice


def check_trace(config: TrainConfig, choice: EngineChoice) -> None:
    """ConfigError for a timeline of an engine that cannot draw one."""
    if config.trace and choice.name != "stream":
        raise ConfigError(
            f"trace: a timeline is recorded by the streaming engine only, and this run is {choice.name}'s "
            f"({choice.reason}). Leave --trace out, or use --engine stream."
        )


def with_flags(config: TrainConfig, user_config: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """The file with the flags that have a key in its outcore block; both engines read them there.

    ConfigError for a state format that cannot go with the precision.
    """
    name = config.state_format
    if name != "auto" and state_format(name).split_master and precision != "bf16":
        other = "fp32_m8" if state_format(name).moments8 else "fp32"
        raise ConfigError(
            f"state_format {name} keeps the master as the bf16 parameter and a residual, so it needs --precision bf16; "
            f"this run computes in {precision}. Use --state_format {other}."
        )
    given: dict[str, Any] = {} if name == "auto" else {"state_format": name}
    if config.ram_budget_gib is not None:
        given["ram_budget_gib"] = config.ram_budget_gib
    return {**user_config, "outcore": {**_block(user_config, "outcore"), **given}} if given else dict(user_config)


def _stage(config: TrainConfig, user_config: Mapping[str, Any]) -> str | None:
    """The ZeRO stage that flag or file ask for, by name; None when neither says (or the builder will refuse it)."""
    if config.zero_stage is not None:
        return config.zero_stage
    block = user_config.get("zero_optimization")
    stage = int(block) if isinstance(block, bool) else _block(user_config, "zero_optimization").get("stage")
    return normalize_stage(stage) if stage in (0, 1, 2, 3) else None


def _only_in_deepspeed(user_config: Mapping[str, Any], precision: str) -> str:
    """What the file asks for that would be other mathematics with the streaming engine; '' when nothing."""
    optimizer = _block(user_config, "optimizer")
    params = _block(optimizer, "params")
    if str(optimizer.get("type", "")).lower() == "adam" and params.get("adam_w_mode") is False:
        return "optimizer.params.adam_w_mode is false (L2 regularisation), and it has AdamW only"
    if params.get("bias_correction") is False:
        return "optimizer.params.bias_correction is false, and its AdamW corrects the bias"
    if params.get("fp32_optimizer_states") is False:
        return "optimizer.params.fp32_optimizer_states is false; its compact states are --state_format split8"
    block = _block(user_config, precision)
    for key in (f"{precision}_master_weights_and_grads", "bf16_optimizer_states"):
        if block.get(key):
            return f"{precision}.{key} is set, and it keeps exact masters and fp32 or 8-bit moments"
    if precision == "fp16" and block.get("loss_scale") not in (None, 0, "auto"):
        return "fp16.loss_scale is fixed, and its loss scale is dynamic"
    return ""


def _block(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = config.get(name)
    return block if isinstance(block, Mapping) else {}
