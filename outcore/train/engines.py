"""Which engine trains this run, and why; and the streaming engine's settings from the run's configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.engine import StreamEngine
from outcore.engine.stream.settings import StreamSettings
from outcore.engine.stream.trace_window import TracePlan
from outcore.model.load import LoadedModel, load_model
from outcore.model.settings import ModelSettings
from outcore.train.arguments import ConfigError
from outcore.train.config import TrainConfig

CPU_STAGING_BYTES = 256 << 20
"""Without a GPU nothing is pinned: the lanes' slots are all that is needed."""
UNUSED_KEYS = ("zero_optimization", "aio", "data_types", "communication_data_type")
"""Keys of deepspeed_config.json that the streaming engine does not use."""


@dataclass(frozen=True)
class EngineChoice:
    """The engine's name and the reason in words."""

    name: str
    reason: str


def choose_engine(config: TrainConfig, user_config: dict[str, Any], world_size: int) -> EngineChoice:
    """`--engine` first, then deepspeed_config.json's outcore block, then auto. ConfigError for what cannot be."""
    block = user_config.get("outcore")
    from_file = block.get("engine", "auto") if isinstance(block, dict) else "auto"
    wanted = config.engine or from_file
    if wanted == "deepspeed":
        return EngineChoice("deepspeed", "as asked")
    if wanted == "stream":
        if world_size > 1:
            raise ConfigError(
                f"engine stream trains on one GPU, this run has {world_size} processes. Use --engine deepspeed, or "
                "start one process."
            )
        if config.zero_stage in ("none", "zero1", "zero2") or config.offload_params == "nvme":
            raise ConfigError(
                "engine stream keeps every state in RAM in this version: leave out --zero_stage and NVMe settings, or "
                "use --engine deepspeed."
            )
        if config.zero_stage == "infinity" and config.nvme_offload_path:
            raise ConfigError(
                "engine stream does not put states on NVMe in this version: use --engine deepspeed for ZeRO-Infinity "
                "on NVMe, or leave out --zero_stage and --nvme_offload_path."
            )
        if config.lora_r:
            raise ConfigError("engine stream does not train LoRA adapters in this version: use --engine deepspeed.")
        return EngineChoice("stream", "as asked")
    return EngineChoice("deepspeed", "auto; --engine stream streams layers from RAM on one GPU (still opt-in)")


def check_trace(config: TrainConfig, choice: EngineChoice) -> None:
    """ConfigError for a timeline of an engine that cannot draw one."""
    if config.trace and choice.name != "stream":
        raise ConfigError(
            f"trace: a timeline is recorded by the streaming engine only, and this run is {choice.name}'s "
            f"({choice.reason}). Leave --trace out, or use --engine stream."
        )


def start_trace(
    engine: StreamEngine, config: TrainConfig, logs: Path, steps_done: int, total_steps: int, say: Callable[[str], None]
) -> None:
    """Have the steps that `--trace` asks for recorded, if any."""
    if config.trace:
        engine.trace(TracePlan.for_run(logs / "trace.json", config.trace, steps_done, total_steps), say)


def build_streaming(
    settings: ModelSettings,
    tokenizer: Any,
    built: dict[str, Any],
    loaded: LoadedModel | None,
    *,
    has_cuda: bool,
    say: Callable[[str], None],
) -> StreamEngine:
    """Load the model whole in RAM and take it apart. `built`: the resolved DeepSpeed configuration."""
    if loaded is None:
        loaded = load_model(settings, tokenizer=tokenizer, device="cpu")
    for note in loaded.notes:
        say(f"model: {note}")
    optimizer = built["optimizer"]["params"]
    stream = StreamSettings(
        betas=(optimizer["betas"][0], optimizer["betas"][1]),
        eps=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=built["gradient_clipping"],
        staging_bytes=built["outcore"]["staging_bytes"] if has_cuda else CPU_STAGING_BYTES,
        seed=settings.seed,
    )
    unused = [key for key in UNUSED_KEYS if key in built]
    say(f"engine: stream does not use these keys of deepspeed_config.json: {', '.join(unused) or 'none'}")
    engine = build_stream_engine(loaded, stream, device="cuda" if has_cuda else "cpu")
    say(f"engine: {engine.describe()}")
    return engine
