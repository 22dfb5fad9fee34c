"""From the chosen engine to a running one: its configuration before data is read, its memory afterwards.

`decide` settles everything that can be settled without weights (flags, files, drive, RAM); `open_engine` loads the
model, once, and makes the engine. A model that turns out not to be streamable only then goes on to DeepSpeed as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from outcore.config import ConfigError, RunSettings
from outcore.engine.base import Decision, Engine
from outcore.engine.deepspeed import RunFacts, decide_deepspeed
from outcore.flow.parts import StreamUnsupported, saved_bytes
from outcore.machine import available_ram_bytes
from outcore.model.facts import ModelFacts, model_facts
from outcore.model.load import LoadedModel, load_model
from outcore.model.settings import ModelSettings
from outcore.model.source import resolve_source
from outcore.train.configure.engine_choice import EngineChoice, ask_model, check_trace
from outcore.train.configure.lora_size import lora_size
from outcore.train.configure.rooms import Hardware
from outcore.train.configure.stream import RunSizes, stream_decision

Say = Callable[[str], None]


def record_of(decision: Decision) -> dict[str, Any]:
    """For logs/<run>/plan.json: the engine, every resolved value with its reason, what the engine made of them."""
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
class EngineRequest:
    """What deciding and building an engine start from."""

    run: RunSettings
    settings: ModelSettings
    tokenizer: Any
    hardware: Hardware
    run_name: str
    local_rank: int = -1
    trace: int = 0

    def run_facts(self) -> RunFacts:
        """Processes and host as DeepSpeed's configuration builder takes them."""
        world_size = self.run.world_size
        local = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world_size))
        return RunFacts(
            world_size=world_size,
            local_world_size=int(local),
            device="cuda" if self.hardware.has_cuda else "cpu",
            run_name=self.run_name,
            ram_available_bytes=available_ram_bytes(),
        )


def decide(request: EngineRequest, choice: EngineChoice, say: Say) -> Decision:
    """All that the engine chooses, with its warnings said. ConfigError for what cannot be."""
    loaded = None
    if request.settings.model_module is not None:
        loaded = load_model(request.settings, tokenizer=request.tokenizer)
    choice = ask_model(choice, request.settings, request.tokenizer, loaded)
    say(f"engine: {choice.name} ({choice.reason})")
    check_trace(request.trace, choice.name, choice.reason)
    try:
        decision = _stream(request, choice, loaded) if choice.name == "stream" else _deepspeed(request, choice, loaded)
    except ValueError as error:
        if not str(error).startswith("deepspeed_config.json:"):
            raise
        words = str(error).removeprefix("deepspeed_config.json")
        raise ConfigError(f"{request.run.file.path}{words}") from error
    for line in decision.words():
        say(line)
    return decision


def _deepspeed(request: EngineRequest, choice: EngineChoice, loaded: LoadedModel | None) -> Decision:
    if request.settings.quantize is not None:
        raise ConfigError(
            f"quantize {request.settings.quantize}: only the streaming engine keeps a packed base, and this run is "
            f"DeepSpeed's ({choice.reason}). Leave quantize out."
        )
    decided = decide_deepspeed(
        request.run, request.settings, request.run_facts(), request.tokenizer, loaded, request.local_rank
    )
    return replace(decided, reason=choice.reason, is_auto=choice.is_auto)


def _stream(request: EngineRequest, choice: EngineChoice, loaded: LoadedModel | None) -> Decision:
    facts = model_facts(loaded.model if loaded else resolve_source(request.settings, request.tokenizer).config)
    decided = stream_decision(request.run, _sizes(request, facts, loaded))
    return replace(decided, reason=choice.reason, is_auto=choice.is_auto, loaded=loaded)


def _sizes(request: EngineRequest, facts: ModelFacts, loaded: LoadedModel | None) -> RunSizes:
    micro, accumulation = request.run.per_device_train_batch_size, request.run.gradient_accumulation_steps
    trainable, total = facts.trainable_params, facts.total_params
    available, saved = available_ram_bytes(), 0
    if loaded is not None:
        available += total * request.settings.dtype.itemsize  # the homes take its place
        saved = 0 if loaded.quantize is None else saved_bytes(loaded.model, loaded.quantize)
    elif request.settings.lora is not None:
        trainable, saved = lora_size(request.settings, request.tokenizer)
        total += trainable
    return RunSizes(
        total_params=total,
        trainable_params=trainable,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        step_tokens=(micro * request.settings.seq_length,) * accumulation,
        ram_available_bytes=available,
        has_cuda=request.hardware.has_cuda,
        row_tokens=request.settings.seq_length,
        saved_bytes=saved,
    )


def open_engine(
    request: EngineRequest, decision: Decision, say: Say, check: Callable[[Decision], None]
) -> tuple[Engine, Decision]:
    """The engine, and the decision that it follows in the end: under auto a model that cannot be streamed after all
    goes to DeepSpeed, as it is, unless `check` refuses that."""
    try:
        return decision.open(request.settings, request.tokenizer, say), decision
    except StreamUnsupported as error:
        choice = EngineChoice(decision.name, decision.reason, decision.is_auto).give_way(str(error))
        say(f"engine: {choice.name} ({choice.reason})")
        # Loaded lazily, no weight has been read yet: DeepSpeed reads them itself.
        decision = _deepspeed(request, choice, decision.loaded)
        check(decision)
        return decision.open(request.settings, request.tokenizer, say), decision
