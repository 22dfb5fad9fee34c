"""Which of the streaming engine's data may leave RAM, and for which folder: flags, then the file, then the defaults.

`cpu` (a flag) keeps it in RAM, `nvme` lets it go to the drive when RAM is full, and so does a named drive with
outcore.residency auto. `none` means the GPU to DeepSpeed; here it means RAM, where all that is not in use lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outcore.config import ConfigError, TrainConfig
from outcore.engine.deepspeed.config.builder import zero_block_of
from outcore.engine.deepspeed.drive.path import resolve_nvme_path
from outcore.engine.deepspeed.notes import Notes
from outcore.engine.deepspeed.offload import nvme_path_of, stage_name, wanted_devices
from outcore.train.configure.rooms import deepspeed_settings_of


@dataclass(frozen=True)
class Wanted:
    """What was asked for, before the drive was tried."""

    states: bool
    """Optimizer states may go to the drive."""
    params: bool
    """Parameters may."""
    is_explicit: bool
    """NVMe was asked for by name, so a drive that cannot be used is worth a loud line."""
    everything: bool
    """outcore.residency nvme: all of it, not only what RAM does not hold."""
    folder: str | None
    """The folder on the drive; None when no drive is named. The engine makes one of its own in it, and removes what a
    killed run left there."""


def wanted_homes(
    config: TrainConfig, user_config: Mapping[str, Any], outcore: Mapping[str, Any], notes: list[str]
) -> Wanted:
    """Read flags and file as DeepSpeed's builder does, contradictions included (ValueError)."""
    settings, diary = deepspeed_settings_of(config), Notes()
    zero = zero_block_of(user_config)
    name = stage_name(zero, settings, outcore, diary)
    optimizer, params = wanted_devices(name, zero, settings, diary)
    residency = outcore.get("residency", "auto")
    flags_say_nvme = name == "infinity" or "nvme" in (settings.offload_optimizer, settings.offload_params)
    is_explicit = "nvme" in (optimizer, params)
    if residency == "ram" and is_explicit and not flags_say_nvme:
        raise ConfigError(
            f"{config.deepspeed_config}: outcore.residency ram contradicts the device nvme in zero_optimization. Set "
            "residency to auto or nvme, or the device to cpu."
        )
    folder = nvme_path_of(zero, outcore, settings, diary)
    for what, device in (("optimizer states", optimizer), ("parameters", params)):
        if device == "none":
            notes.append(f"{what}: in RAM (offload none keeps them on the GPU with DeepSpeed only)")
    if config.nvme_offload_gradients:
        notes.append("nvme_offload_gradients: gradients stay in RAM, where the optimizer takes them from")
    spill = folder is not None and residency == "auto"
    open_states = _is_open(config.offload_optimizer, name, settings.nvme_offload_optimizer)
    open_params = _is_open(config.offload_params, name, settings.nvme_offload_params)
    return Wanted(
        states=optimizer == "nvme" or (spill and open_states),
        params=params == "nvme" or (spill and open_params),
        is_explicit=is_explicit,
        everything=residency == "nvme" and config.zero_stage is None,
        folder=str(resolve_nvme_path(folder)) if folder is not None else None,
    )


def _is_open(flag: str, stage: str, of_infinity: bool) -> bool:
    """Whether a drive that is named may take it although nobody said nvme."""
    return flag in ("auto", "nvme") and (stage != "infinity" or of_infinity)
