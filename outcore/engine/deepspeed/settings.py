"""Arguments of the DeepSpeed configuration builder besides `RunSettings`, and its result.

`RunFacts` describes the processes (`WeightCounts` the model), `BuiltConfig` is the resolved configuration with one
note per decision."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from outcore.config import Device
from outcore.sizing.swapping import check_positive_int
from outcore.storage import DRIVE_ACCESS, DriveAccess


@dataclass(frozen=True)
class RunFacts:
    """Facts about the processes and their host, for the builder."""

    world_size: int = 1
    local_world_size: int | None = None
    """Ranks on this host. None: all of them."""
    device: Literal["cuda", "cpu"] = "cuda"
    run_name: str | None = None
    """Keeps this run's swap files apart from another run's on the same drive."""
    ram_available_bytes: int | None = None
    """RAM this run may take on this host; None turns the automatic spill to NVMe off."""

    def __post_init__(self) -> None:
        for name in ("world_size", "local_world_size"):
            value = getattr(self, name)
            if value is not None:
                check_positive_int(name, value)
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f"device {self.device!r} is unknown. Use cuda or cpu.")
        if self.local_world_size is not None and self.local_world_size > self.world_size:
            raise ValueError(f"local_world_size {self.local_world_size} exceeds world_size {self.world_size}.")
        if self.run_name is not None and (self.run_name in ("", ".", "..") or "/" in self.run_name):
            raise ValueError(f"run_name {self.run_name!r} is no folder name: it must not be empty or contain '/'.")

    @property
    def local_ranks(self) -> int:
        """Ranks on this host."""
        return self.local_world_size or self.world_size


@dataclass(frozen=True)
class ChosenOffload:
    """Homes that things really have once every fallback was taken."""

    stage: int
    optimizer: Device
    params: Device
    nvme_path: str | None
    """Folder DeepSpeed is given (it removes and recreates `zero_stage_3` in it at start); None without NVMe."""
    staged: bool = False
    """Whether outcore's own optimizer step and parameter swapper run in DeepSpeed's place (`staged/`)."""
    states: str = "fp32"
    """Format of the staged optimizer states."""
    ram_budget_bytes: int | None = None
    """Staged: RAM per rank for parameters, gradients, states and staging memory; what exceeds it lives on the drive.
    None: what was sent to the drive lives there whole."""
    gradients_on_nvme: bool = False
    """Staged: gradients live on the drive as well."""
    live_numel: int = 0
    """With parameters on the drive: elements that DeepSpeed keeps on the GPU or fetches ahead, at most."""
    drives: tuple[str, ...] = ()
    """Folders as `nvme_path`, one for each drive that this host's ranks take in turn."""
    storage: DriveAccess = DRIVE_ACCESS
    """Name, threads and block of what moves bytes to and from the drive (`outcore.storage`)."""
    nvme_checksums: Literal["auto", "on", "off", "sampled"] = "auto"
    """Staged: verify what the drive gives back."""

    @property
    def uses_nvme(self) -> bool:
        """True when anything lives on the drive."""
        return "nvme" in (self.optimizer, self.params)


@dataclass(frozen=True)
class BuiltConfig:
    """A DeepSpeed configuration without any "auto", and the reasons for its values."""

    config: dict[str, Any]
    notes: tuple[str, ...]
    offload: ChosenOffload
    warnings: tuple[str, ...] = field(default=())
    """The notes that must be shown loudly: fallbacks, changed user values, settings that cost much."""

    def of_rank(self, local_rank: int) -> BuiltConfig:
        """Settings with the drive of that rank of the host, in turn."""
        drives = self.offload.drives
        if len(drives) < 2:
            return self
        path = drives[local_rank % len(drives)]
        zero = {
            name: {**block, "nvme_path": path} if isinstance(block, dict) and "nvme_path" in block else block
            for name, block in self.config["zero_optimization"].items()
        }
        config = {**self.config, "zero_optimization": zero}
        return replace(self, config=config, offload=replace(self.offload, nvme_path=path))


class Notes:
    """Collects lines; `warnings` are those that must be shown even when the rest is not."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def chose(self, key: str, value: Any, reason: str) -> None:
        """A default was taken."""
        self.lines.append(f"{key} = {value}: {reason}")

    def changed(self, key: str, old: Any, new: Any, reason: str) -> None:
        """A value the user gave was replaced."""
        self.warn(f"{key} changed from {old} to {new}: {reason}")

    def dropped(self, key: str, reason: str) -> None:
        """A value the user gave has no effect and was left out."""
        self.warn(f"{key} left out: {reason}")

    def warn(self, text: str) -> None:
        """A line that must be seen."""
        self.lines.append(text)
        self.warnings.append(text)
