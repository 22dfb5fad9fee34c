"""What DeepSpeed's engine chose for a run, printable, and how it is opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outcore.config import RunSettings
from outcore.engine.base import Engine, Host
from outcore.engine.deepspeed.build import Resolved, build_engine, init_process_group, resolve
from outcore.engine.deepspeed.settings import ChosenOffload, RunFacts
from outcore.flow.weights import choose_verification
from outcore.model import LoadedModel, ModelSettings
from outcore.sizing.layouts import DeepSpeedLayout, Staged

STAGE_NAMES = ("none", "zero1", "zero2", "zero3")


def deepspeed_layout(offload: ChosenOffload, settings: RunSettings, num_gpus: int) -> DeepSpeedLayout:
    """What bytes and seconds depend on of these homes and settings."""
    staged = None
    if offload.staged:
        per_rank = offload.ram_budget_bytes
        staged = Staged(
            offload.states,
            None if per_rank is None else per_rank * num_gpus,
            settings.staging_bytes,
            settings.offload.max_in_cpu_numel * settings.element_bytes if offload.params == "nvme" else 0,
            offload.gradients_on_nvme,
        )
    return DeepSpeedLayout(
        "infinity" if offload.uses_nvme else STAGE_NAMES[offload.stage],
        offload.optimizer,
        offload.params,
        settings.per_device_train_batch_size,
        settings.gradient_accumulation_steps,
        staged=staged,
        packed_attention=settings.packed_attention,
    )


@dataclass(frozen=True)
class DeepSpeedDecision:
    """DeepSpeed's configuration, and what it was decided from; see `Decision`."""

    resolved: Resolved
    reason: str = ""
    is_auto: bool = False
    loaded: LoadedModel | None = None
    name: str = "deepspeed"
    draws_timeline: bool = False
    shortage: str = ""
    """Left to the planner, which counts DeepSpeed's copies."""

    @property
    def settings(self) -> RunSettings:
        """What was resolved for the run."""
        return self.resolved.settings

    @property
    def notes(self) -> tuple[str, ...]:
        """A line per choice."""
        return self.resolved.built.notes

    @property
    def nvme_path(self) -> str | None:
        """The folder that takes what is offloaded to the drive."""
        return self.resolved.built.offload.nvme_path

    @property
    def state_format(self) -> str:
        """How optimizer states are kept."""
        return self.resolved.built.offload.states

    @property
    def layout(self) -> DeepSpeedLayout:
        """How the model is run, as the planner counts it."""
        run = self.resolved.run
        num_gpus = run.world_size if run.device == "cuda" else 1
        return deepspeed_layout(self.resolved.built.offload, self.settings, num_gpus)

    def words(self) -> list[str]:
        """Lines to show before anything is read or built."""
        built = self.resolved.built
        is_ours = built.offload.staged and self.nvme_path is not None
        slow_drive = [note for note in built.notes if "Warning:" in note]
        homes = {"none": "on the device", "cpu": "in RAM", "nvme": f"on NVMe ({built.offload.nvme_path})"}
        return [
            *(f"WARNING: {warning}" for warning in dict.fromkeys([*built.warnings, *slow_drive])),
            f"engine: ZeRO stage {built.offload.stage}, optimizer states {homes[built.offload.optimizer]}, parameters "
            f"{homes[built.offload.params]}",
            *([f"engine: {choose_verification(built.offload.nvme_checksums).words}"] * is_ours),
        ]

    def record(self) -> dict[str, Any]:
        """Plain values for plan.json."""
        return {"deepspeed": self.resolved.built.config, "offload": asdict(self.resolved.built.offload)}

    def forget(self) -> None:
        """Remove the folder that was made on the drive to try it, unless a run of that name is there."""
        if self.nvme_path is not None:
            with suppress(OSError):
                Path(self.nvme_path).rmdir()

    def open(self, model: ModelSettings, tokenizer: Any, say: Callable[[str], None]) -> Engine:
        """Load the model, partitioned under ZeRO-3, and make the engine."""
        return build_engine(self.resolved, model, tokenizer, self.loaded, say=say)


def decide_deepspeed(
    settings: RunSettings, model: ModelSettings, host: Host, tokenizer: Any, loaded: LoadedModel | None
) -> DeepSpeedDecision:
    """Rank 0 decides (free space and drives are looked at once); the others follow."""
    init_process_group(host.has_cuda, host.local_rank)
    local = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", settings.world_size))
    run = RunFacts(
        world_size=settings.world_size,
        local_world_size=int(local),
        device="cuda" if host.has_cuda else "cpu",
        run_name=host.run_name,
        ram_available_bytes=host.ram_available_bytes,
    )
    resolved, loaded = resolve(settings, model, run, tokenizer, loaded)
    if run.world_size > 1:
        shared = [resolved.built]
        torch.distributed.broadcast_object_list(shared, src=0)
        resolved = replace(resolved, built=shared[0].of_rank(max(0, host.local_rank)))
    return DeepSpeedDecision(resolved, loaded=loaded)
