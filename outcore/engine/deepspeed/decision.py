"""What DeepSpeed's engine chose for a run, printable, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outcore.config import RunSettings
from outcore.engine.base import Engine
from outcore.engine.deepspeed.build import Resolved, build_engine, init_process_group, resolve
from outcore.engine.deepspeed.settings import RunFacts
from outcore.flow.weights import choose_verification
from outcore.model.load import LoadedModel
from outcore.model.settings import ModelSettings


@dataclass(frozen=True)
class DeepSpeedDecision:
    """DeepSpeed's configuration, and what it was decided from; see `Decision`."""

    resolved: Resolved
    reason: str = ""
    is_auto: bool = False
    loaded: LoadedModel | None = None
    name: str = "deepspeed"
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
    def planned(self) -> dict[str, Any]:
        """What the planner is told of it."""
        return {"offload": self.resolved.built.offload}

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
    settings: RunSettings,
    model: ModelSettings,
    run: RunFacts,
    tokenizer: Any,
    loaded: LoadedModel | None,
    local_rank: int,
) -> DeepSpeedDecision:
    """Rank 0 decides (free space and drives are looked at once); the others follow."""
    init_process_group(run.device != "cpu", local_rank)
    resolved, loaded = resolve(settings, model, run, tokenizer, loaded)
    if run.world_size > 1:
        shared = [resolved.built]
        torch.distributed.broadcast_object_list(shared, src=0)
        resolved = replace(resolved, built=shared[0])
    return DeepSpeedDecision(resolved, loaded=loaded)
