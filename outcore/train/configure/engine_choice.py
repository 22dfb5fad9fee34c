"""Which engine trains this run, and why: the rule, what was asked for, and what the model itself says.

`auto` streams a decoder-only model on one process (`outcore.sizing.engine_rule`); what the streaming engine cannot do
goes to DeepSpeed, with the reason in words. `--engine stream` where it cannot is a ConfigError with the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outcore.config import ConfigError, RunSettings
from outcore.engine.stream import why_config_not_trained, why_not_trained
from outcore.model.facts import resolve_attention
from outcore.model.load import LoadedModel
from outcore.model.settings import ModelSettings
from outcore.model.source import resolve_source
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


def choose_engine(settings: RunSettings) -> EngineChoice:
    """What was asked for, else auto; the model is asked by `ask_model`. ConfigError for what cannot be."""
    if settings.engine == "deepspeed":
        return EngineChoice("deepspeed", "as asked")
    if settings.engine == "stream":
        choice = EngineChoice("stream", "as asked")
    else:
        choice = EngineChoice("stream", "auto: one process and a decoder-only model", is_auto=True)
    why = why_not_stream(settings.world_size, settings.zero_stage) or _only_in_deepspeed(settings)
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


def check_trace(steps: int, engine: str, reason: str) -> None:
    """ConfigError for a timeline of an engine that cannot draw one."""
    if steps and engine != "stream":
        raise ConfigError(
            f"trace: a timeline is recorded by the streaming engine only, and this run is {engine}'s "
            f"({reason}). Leave --trace out, or use --engine stream."
        )


def _only_in_deepspeed(settings: RunSettings) -> str:
    """What the file asks for that would be other mathematics with the streaming engine; '' when nothing."""
    file, precision = settings.file, settings.precision
    is_adam = str(file.get("optimizer.type", "")).lower() == "adam"
    if is_adam and file.get("optimizer.params.adam_w_mode") is False:
        return "optimizer.params.adam_w_mode is false (L2 regularisation), and it has AdamW only"
    if file.get("optimizer.params.bias_correction") is False:
        return "optimizer.params.bias_correction is false, and its AdamW corrects the bias"
    if file.get("optimizer.params.fp32_optimizer_states") is False:
        return "optimizer.params.fp32_optimizer_states is false; its compact states are --state_format split8"
    for key in (f"{precision}.{precision}_master_weights_and_grads", f"{precision}.bf16_optimizer_states"):
        if file.get(key):
            return f"{key} is set, and it keeps exact masters and fp32 or 8-bit moments"
    if precision == "fp16" and file.get("fp16.loss_scale", 0) != 0:
        return "fp16.loss_scale is fixed, and its loss scale is dynamic"
    return ""
