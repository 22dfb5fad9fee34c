"""ZeRO-Infinity's public functions: check the drive, estimate the space, build and save a configuration.

    ok, message = validate_nvme_path("/mnt/nvme/outcore", required_space_gb=120)
    gb = estimate_nvme_space_required(8_000_000_000, True, True, False)
    speed = check_nvme_performance("/mnt/nvme/outcore")
    config = build_infinity_config(base_config, nvme_path="/mnt/nvme/outcore", model=facts)
    save_infinity_config(config, "my_config.json")

The training script itself uses `builder.build_config`, which resolves the whole configuration for a model and a run;
the functions here are for notebooks, other scripts and the settings panel."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from outcore.common.files import write_atomic
from outcore.common.quantities import GB
from outcore.config import ProcessFacts, TrainConfig, resolve, understand
from outcore.engine.deepspeed.config.builder import build_config
from outcore.engine.deepspeed.settings import RunFacts
from outcore.machine.offload import NvmePathError, resolve_nvme_path, validate_nvme_path
from outcore.sizing.swapping import WeightCounts
from outcore.staging import NvmePerformance, check_nvme_performance

__all__ = [
    "NvmePathError",
    "NvmePerformance",
    "build_infinity_config",
    "check_nvme_performance",
    "estimate_nvme_space_required",
    "nvme_space_parts_gb",
    "resolve_nvme_path",
    "save_infinity_config",
    "validate_nvme_path",
]

BYTES_PER_PARAM: dict[str, int] = {"parameters": 6, "optimizer": 8, "gradients": 4}
"""Drive bytes per parameter by part: 16-bit parameter and its fp32 master; two fp32 moments; fp32 gradient."""
ASSUMED_LARGEST_WEIGHT_NUMEL = 600_000_000
"""Without model facts: room for a vocabulary of 146,000 at width 4096."""


def nvme_space_parts_gb(
    total_params: int, offload_params: bool, offload_optimizer: bool, offload_gradients: bool
) -> dict[str, float]:
    """GB (10**9 bytes) per offloaded part, without a safety factor; parts that stay in RAM are 0.

    Raises:
        ValueError: `total_params` is not a whole number of 0 or more."""
    if isinstance(total_params, bool) or not isinstance(total_params, int) or total_params < 0:
        raise ValueError(f"total_params must be a whole number of 0 or more, got {total_params!r}.")
    chosen = {"parameters": offload_params, "optimizer": offload_optimizer, "gradients": offload_gradients}
    return {part: total_params * BYTES_PER_PARAM[part] / GB if on else 0.0 for part, on in chosen.items()}


def estimate_nvme_space_required(
    total_params: int,
    offload_params: bool,
    offload_optimizer: bool,
    offload_gradients: bool,
    safety_factor: float = 1.5,
) -> float:
    """GB (10**9 bytes) of drive space that offloading `total_params` parameters needs.

    Counted per parameter: with `offload_params` 6 B (16-bit parameter and the exact fp32 master it is rounded from),
    with `offload_optimizer` 8 B (Adam's two fp32 moments), with `offload_gradients` 4 B (fp32 gradient); then
    multiplied by `safety_factor`. Everything is 18 B, which is what DeepSpeed writes with all on NVMe: 1 B parameters
    x 1.5 = 27 GB.

    A run checks the free space against what its own format of states takes (`swapping.nvme_bytes`); this estimate is
    the one by parts, for planning.

    Raises:
        ValueError: a negative count, or a factor below 1 or not finite."""
    if isinstance(safety_factor, bool) or not isinstance(safety_factor, (int, float)):
        raise ValueError(f"safety_factor must be a number of 1 or more, got {safety_factor!r}.")
    if not 1 <= safety_factor < math.inf:
        raise ValueError(f"safety_factor must be 1 or more (1.0 is no margin at all), got {safety_factor!r}.")
    parts = nvme_space_parts_gb(total_params, offload_params, offload_optimizer, offload_gradients)
    return sum(parts.values()) * safety_factor


def build_infinity_config(
    base_config: Mapping[str, Any],
    *,
    nvme_path: str | os.PathLike[str],
    offload_optimizer: bool = True,
    offload_params: bool = True,
    offload_gradients: bool = False,
    aio_block_size: int = 1 << 20,
    aio_queue_depth: int = 8,
    pin_memory: bool = True,
    max_in_cpu_gb: float = 1.0,
    model: WeightCounts | None = None,
    world_size: int = 1,
) -> dict[str, Any]:
    """`base_config` with ZeRO-3 and NVMe offload, as a new dict; `base_config` is never changed.

    Only what offloading concerns is replaced (zero_optimization, aio, torch's own AdamW); everything else is copied as
    it is. What is offloaded is moved by outcore's staged offload; `offload_gradients` is written as
    outcore.nvme_offload_gradients, which stock DeepSpeed does not have. The path is not touched; `validate_nvme_path`
    checks it.

    Raises:
        ValueError: an unusable spelling of the path, values out of range, contradictory keys in `base_config`."""
    folder = resolve_nvme_path(nvme_path)
    facts = model or WeightCounts(ASSUMED_LARGEST_WEIGHT_NUMEL * 16, ASSUMED_LARGEST_WEIGHT_NUMEL)
    asked = TrainConfig(
        zero_stage="infinity",
        nvme_offload_path=str(folder),
        nvme_offload_optimizer=offload_optimizer,
        nvme_offload_params=offload_params,
        nvme_offload_gradients=offload_gradients,
        aio_block_size=aio_block_size,
        aio_queue_depth=aio_queue_depth,
        pin_memory=pin_memory,
        max_in_cpu_gb=max_in_cpu_gb,
        strict_offload=True,
    )
    settings = resolve(asked, understand(base_config), ProcessFacts(world_size=world_size))
    run = RunFacts(world_size=world_size)
    if settings.offload.gradients_on_nvme:
        if not offload_optimizer or settings.offload.engine != "staged":
            raise ValueError(
                "offload_gradients needs offload_optimizer=True and outcore's staged offload (outcore.offload "
                "'staged', the default): stock DeepSpeed has no such setting."
            )
        settings = replace(settings, offload=replace(settings.offload, gradients_on_nvme=False))  # a key of ours
    built = build_config(settings, facts, run, nvme_check=_unchecked, staged=settings.offload.engine == "staged")
    config = copy.deepcopy(dict(base_config))
    config["zero_optimization"] = built.config["zero_optimization"]
    if "aio" in built.config:
        config["aio"] = built.config["aio"]
    if offload_gradients:  # read by the staged offload; stock DeepSpeed ignores the block
        config["outcore"] = {**config.get("outcore", {}), "nvme_offload_gradients": True}
    params = (config.get("optimizer") or {}).get("params")
    if params and built.offload.optimizer != "none":
        for key in ("torch_adam", "fused", "foreach"):  # torch's own; offloaded states need DeepSpeed's for the CPU
            params.pop(key, None)
    return config


def _unchecked(path: str, required_space_gb: float) -> tuple[bool, str]:
    return True, f"{path} is not checked for {required_space_gb:.1f} GB."


def save_infinity_config(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write `config` as JSON, atomically: a reader sees the old file or the whole new one. Returns the path.

    Raises:
        ValueError: the configuration is not plain JSON (for instance NaN or a tensor in it).
        OSError: the file cannot be written."""
    target = Path(os.path.abspath(os.path.expanduser(os.fspath(path))))
    try:
        text = json.dumps(config, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"The configuration cannot be saved as JSON: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
    write_atomic(target, text)
    os.chmod(target, mode)
    return target
