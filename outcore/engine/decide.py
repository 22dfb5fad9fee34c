"""Which engine trains this run, and why; what it decides for it; and how it is opened.

`decide` settles everything that can be settled without weights (flags, files, drive, RAM); `open_engine` loads the
model, once, and makes the engine. `auto` streams a decoder-only model on the ranks of one host
(`outcore.sizing.engine_rule`); what the streaming engine cannot do goes to DeepSpeed, with the reason in words.
`--engine stream` where it cannot is a ConfigError with the same reason."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from outcore.config import ConfigError, RunSettings
from outcore.engine.base import Decision, Engine, Host
from outcore.engine.deepspeed import decide_deepspeed
from outcore.engine.stream import decide_stream, why_config_not_trained, why_not_trained
from outcore.flow.parts import StreamUnsupported
from outcore.model import LoadedModel, ModelSettings, load_model, resolve_source
from outcore.model.facts import resolve_attention
from outcore.sizing.engine_rule import why_not_stream

Say = Callable[[str], None]


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
    """Choose the engine that was asked for, else auto; the model is asked by `ask_model`. ConfigError for what cannot
    be."""
    if settings.engine == "deepspeed":
        return EngineChoice("deepspeed", "as asked")
    if settings.engine == "stream":
        choice = EngineChoice("stream", "as asked")
    else:
        ranks = f"{settings.world_size} ranks of one host" if settings.world_size > 1 else "one process"
        choice = EngineChoice("stream", f"auto: {ranks} and a decoder-only model", is_auto=True)
    why = why_not_stream(settings.world_size, settings.zero_stage, processes_per_host=settings.ranks_per_host)
    why = why or _cannot_share(settings.world_size) or _only_in_deepspeed(settings)
    return choice.give_way(why) if why else choice


def ask_model(
    choice: EngineChoice, settings: ModelSettings, tokenizer: Any, loaded: LoadedModel | None
) -> EngineChoice:
    """The choice after a tiny copy of the model was tried; costs a fraction of a second and reads no weights.

    `loaded`: a model_module's own model, which is there already."""
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


def decide(settings: RunSettings, model: ModelSettings, host: Host, tokenizer: Any, say: Say) -> Decision:
    """All that the engine chooses, with its warnings said. ConfigError for what cannot be."""
    loaded = load_model(model, tokenizer=tokenizer) if model.model_module is not None else None
    choice = ask_model(choose_engine(settings), model, tokenizer, loaded)
    say(f"engine: {choice.name} ({choice.reason})")
    try:
        if choice.name == "stream":
            decided = decide_stream(settings, model, host, tokenizer, loaded)
            decision: Decision = replace(decided, reason=choice.reason, is_auto=choice.is_auto)
        else:
            decision = _deepspeed(settings, model, host, tokenizer, loaded, choice)
    except ValueError as error:
        if not str(error).startswith("deepspeed_config.json:"):
            raise
        words = str(error).removeprefix("deepspeed_config.json")
        raise ConfigError(f"{settings.file.path}{words}") from error
    for line in decision.words():
        say(line)
    return decision


def open_engine(
    decision: Decision, model: ModelSettings, host: Host, tokenizer: Any, say: Say, check: Callable[[Decision], None]
) -> tuple[Engine, Decision]:
    """The engine, and the decision that it follows in the end: under auto a model that cannot be streamed after all
    goes to DeepSpeed, as it is, unless `check` refuses that."""
    try:
        return decision.open(model, tokenizer, say), decision
    except StreamUnsupported as error:
        choice = EngineChoice(decision.name, decision.reason, decision.is_auto).give_way(str(error))
        say(f"engine: {choice.name} ({choice.reason})")
        # Loaded lazily, no weight has been read yet: DeepSpeed reads them itself.
        decision = _deepspeed(decision.settings, model, host, tokenizer, decision.loaded, choice)
        check(decision)
        return decision.open(model, tokenizer, say), decision


def _deepspeed(
    settings: RunSettings,
    model: ModelSettings,
    host: Host,
    tokenizer: Any,
    loaded: LoadedModel | None,
    choice: EngineChoice,
) -> Decision:
    for name, usual in (("optimizer", "adamw"), ("matmul", "same")):
        if (asked := getattr(settings, name)) != usual:
            raise ConfigError(
                f"{name} {asked} is the streaming engine's, and this run is DeepSpeed's ({choice.reason}). Leave it "
                "out."
            )
    if model.quantize is not None:
        raise ConfigError(
            f"quantize {model.quantize}: only the streaming engine keeps a packed base, and this run is DeepSpeed's "
            f"({choice.reason}). Leave quantize out."
        )
    decided = decide_deepspeed(settings, model, host, tokenizer, loaded)
    return replace(decided, reason=choice.reason, is_auto=choice.is_auto)


def _cannot_share(world_size: int) -> str:
    """Why ranks cannot share memory on this system; '' when they can, or there is one only."""
    if world_size == 1 or hasattr(os, "memfd_create"):
        return ""
    return f"its ranks share memory through memfd, which {platform.system()} does not have"


def _only_in_deepspeed(settings: RunSettings) -> str:
    """Words for what was asked for that the streaming engine would do otherwise or not at all; '' when nothing."""
    file, precision = settings.file, settings.precision
    if settings.offload.gradients_on_nvme:
        return "nvme_offload_gradients is set, and its gradients stay in RAM, where its optimizer takes them from"
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
