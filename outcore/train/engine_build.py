"""From the chosen engine to a running one: its configuration before data is read, its memory afterwards.

`decide` settles everything that can be settled without weights (flags, files, drive, RAM); `build` loads the model,
once, and makes the engine. A model that turns out not to be streamable only then goes on to DeepSpeed as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from outcore.config import ConfigError, RunSettings
from outcore.engine.deepspeed.build import Resolved, build_engine, init_process_group, resolve
from outcore.engine.deepspeed.engine import DeepSpeedEngine
from outcore.engine.deepspeed.settings import RunFacts
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.engine import StreamEngine
from outcore.flow.parts import StreamUnsupported, saved_bytes
from outcore.machine import available_ram_bytes
from outcore.model.facts import ModelFacts, model_facts
from outcore.model.load import LoadedModel, load_model
from outcore.model.settings import ModelSettings
from outcore.model.source import resolve_source
from outcore.train.configure.engine_choice import EngineChoice, ask_model, check_trace
from outcore.train.configure.lora_size import lora_size
from outcore.train.configure.rooms import Hardware
from outcore.train.configure.stream import RunSizes, StreamPlan, stream_settings_of

AnyEngine = DeepSpeedEngine | StreamEngine
Say = Callable[[str], None]


@dataclass(frozen=True)
class Decided:
    """What is settled before data is read."""

    choice: EngineChoice
    settings: RunSettings
    notes: tuple[str, ...]
    nvme_path: str | None
    """Where states live during the run, when on a drive."""
    deepspeed: Resolved | None
    stream: StreamPlan | None
    loaded: LoadedModel | None
    """A model_module's own model, which had to be built to be known."""

    def record(self) -> dict[str, Any]:
        """For logs/<run>/plan.json."""
        engine: dict[str, Any] = {"name": self.choice.name, "reason": self.choice.reason}
        record: dict[str, Any] = {"engine": engine, "notes": self.notes, "settings": settings_record(self.settings)}
        if self.deepspeed is not None:
            built = self.deepspeed.built
            return {**record, "deepspeed": built.config, "offload": asdict(built.offload)}
        assert self.stream is not None
        return {**record, "stream": asdict(self.stream.settings), "unused": self.stream.unused}


def settings_record(settings: RunSettings) -> dict[str, Any]:
    """Every resolved value with its reason, as plain values."""
    plain = {f.name: getattr(settings, f.name) for f in fields(settings) if f.compare}
    nested = {"offload": asdict(settings.offload), "loss_scaling": asdict(settings.loss_scaling)}
    return {"train_batch_size": settings.train_batch_size, **plain, **nested, "reasons": dict(settings.reasons)}


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


def decide(request: EngineRequest, choice: EngineChoice, say: Say) -> Decided:
    """The engine's whole configuration, with its warnings said. ConfigError for what cannot be."""
    loaded = None
    if request.settings.model_module is not None:
        loaded = load_model(request.settings, tokenizer=request.tokenizer)
    choice = ask_model(choice, request.settings, request.tokenizer, loaded)
    say(f"engine: {choice.name} ({choice.reason})")
    check_trace(request.trace, choice)
    try:
        decided = _stream(request, choice, loaded) if choice.name == "stream" else _deepspeed(request, choice, loaded)
    except ValueError as error:
        if not str(error).startswith("deepspeed_config.json:"):
            raise
        words = str(error).removeprefix("deepspeed_config.json")
        raise ConfigError(f"{request.run.file.path}{words}") from error
    for line in _loud(decided):
        say(line)
    return decided


def _deepspeed(request: EngineRequest, choice: EngineChoice, loaded: LoadedModel | None) -> Decided:
    """Rank 0 decides (free space and drives are looked at once); the others follow."""
    if request.settings.quantize is not None:
        raise ConfigError(
            f"quantize {request.settings.quantize}: only the streaming engine keeps a packed base, and this run is "
            f"DeepSpeed's ({choice.reason}). Leave quantize out."
        )
    init_process_group(request.hardware.has_cuda, request.local_rank)
    resolved, loaded = resolve(request.run, request.settings, request.run_facts(), request.tokenizer, loaded)
    if request.run.world_size > 1:
        shared = [resolved.built]
        torch.distributed.broadcast_object_list(shared, src=0)
        resolved = replace(resolved, built=shared[0])
    built = resolved.built
    return Decided(choice, request.run, built.notes, built.offload.nvme_path, resolved, None, loaded)


def _stream(request: EngineRequest, choice: EngineChoice, loaded: LoadedModel | None) -> Decided:
    facts = model_facts(loaded.model if loaded else resolve_source(request.settings, request.tokenizer).config)
    plan = stream_settings_of(request.run, _sizes(request, facts, loaded))
    path = plan.settings.nvme_paths
    return Decided(choice, request.run, tuple(plan.notes), path[0] if path else None, None, plan, loaded)


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


def _loud(decided: Decided) -> list[str]:
    """What is shown before anything is read or built."""
    if decided.stream is not None:
        plan = decided.stream
        lines = [f"WARNING: {warning}" for warning in dict.fromkeys(plan.warnings)]
        lines += [f"engine: {note}" for note in plan.notes]
        unused = f"engine: without effect here, of the DeepSpeed file: {grouped(plan.unused, most=2)}"
        return [*lines, *([unused] if plan.unused else [])]
    assert decided.deepspeed is not None
    built = decided.deepspeed.built
    slow_drive = [note for note in built.notes if "Warning:" in note]
    lines = [f"WARNING: {warning}" for warning in dict.fromkeys([*built.warnings, *slow_drive])]
    homes = {"none": "on the device", "cpu": "in RAM", "nvme": f"on NVMe ({built.offload.nvme_path})"}
    return [
        *lines,
        f"engine: ZeRO stage {built.offload.stage}, optimizer states {homes[built.offload.optimizer]}, parameters "
        f"{homes[built.offload.params]}",
    ]


def grouped(keys: list[str], most: int | None = None) -> str:
    """Dotted keys in one line, those of one block together: 'zero_optimization (a, b), aio'; more than `most` of a
    block are only counted (plan.json has them all)."""
    blocks: dict[str, list[str]] = {}
    for key in keys:
        block, _, rest = key.partition(".")
        blocks.setdefault(block, []).extend([rest] if rest else [])
    words = {
        block: ", ".join(rest) if most is None or len(rest) <= most else f"{len(rest)} keys"
        for block, rest in blocks.items()
    }
    return ", ".join(f"{block} ({inside})" if inside else block for block, inside in words.items())


def build(request: EngineRequest, decided: Decided, say: Say) -> tuple[AnyEngine, Decided]:
    """Load the model and make the engine; under auto a model that cannot be streamed after all goes to DeepSpeed."""
    if decided.stream is None:
        assert decided.deepspeed is not None
        return build_engine(decided.deepspeed, request.settings, request.tokenizer, decided.loaded, say=say), decided
    loaded = decided.loaded or load_model(request.settings, tokenizer=request.tokenizer, lazy=True)
    device = "cuda" if request.hardware.has_cuda else "cpu"
    try:
        engine = build_stream_engine(loaded, decided.stream.settings, device=device)
    except StreamUnsupported as error:
        choice = decided.choice.give_way(str(error))
        say(f"engine: {choice.name} ({choice.reason})")
        whole = loaded if loaded.feed is None else None  # loaded lazily, no weight has been read yet
        return build(request, _deepspeed(request, choice, whole), say)
    for note in loaded.notes:
        say(f"model: {note}")
    say(f"engine: {engine.describe()}")
    return engine, decided
