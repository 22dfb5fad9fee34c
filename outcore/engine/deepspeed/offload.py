"""Where optimizer states and parameters live: from flags, deepspeed_config.json, the drive's state and free RAM.

Order: what the user set explicitly, then the file, then the default of the stage. An unusable drive means RAM (or an
error with `strict_offload`); states that do not fit the RAM spill to the drive when there is one (`outcore.residency`
auto).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outcore.common.quantities import GB, GIB, format_gb, format_gib
from outcore.engine.deepspeed.drive.path import NvmePathError, check_direct_io, resolve_nvme_path, validate_nvme_path
from outcore.engine.deepspeed.notes import Notes
from outcore.engine.deepspeed.settings import STAGES, DeepSpeedSettings, OffloadChoice, RunFacts
from outcore.sizing.deepspeed import (
    NVME_RAM_BYTES_PER_PARAM,
    RAM_BYTES_PER_PARAM,
    RAM_OVERHEAD_BYTES,
    Device,
    Precision,
)
from outcore.sizing.swapping import WeightCounts, nvme_bytes

NvmeCheck = Callable[[str, float], tuple[bool, str]]
"""(path, required GB) -> (usable, message), as `validate_nvme_path`."""


@dataclass(frozen=True)
class OffloadCosts:
    """Bytes per parameter that an offload engine takes, for deciding what fits where."""

    ram: float
    """Everything in RAM."""
    ram_overhead: int
    """Bytes beside the parameters, per rank."""
    ram_optimizer_on_nvme: float
    nvme_optimizer: float
    """On the drive, per trainable parameter."""
    is_partial: bool = False
    """Whether states may lie partly in RAM and partly on the drive."""


STOCK_COSTS = OffloadCosts(
    ram=RAM_BYTES_PER_PARAM,
    ram_overhead=RAM_OVERHEAD_BYTES,
    ram_optimizer_on_nvme=NVME_RAM_BYTES_PER_PARAM,
    nvme_optimizer=16,
)
"""Stock DeepSpeed 0.19.8; on the drive fp32 master, two moments and the fp32 gradients."""
RAM_RESERVE_BYTES = 2 << 30
"""Of the free RAM, left to the process itself and everything else when states spill to the drive."""
SPACE_SAFETY = 1.1
"""On top of the bytes DeepSpeed writes: file-system overhead, padding of shares."""


def usable_for_deepspeed(path: str, required_space_gb: float) -> tuple[bool, str]:
    """`validate_nvme_path` and, since stock DeepSpeed depends on them, direct transfers in steps of 1 KiB."""
    ok, message = validate_nvme_path(path, required_space_gb)
    if not ok:
        return ok, message
    direct_ok, reason = check_direct_io(path)
    if not direct_ok:
        return False, f"{message} But DeepSpeed cannot offload there: {reason}. Choose a folder on a local NVMe drive."
    return True, message


@dataclass(frozen=True)
class Placement:
    """The decided stage and homes."""

    stage: int
    optimizer: Device
    params: Device
    nvme_path: str | None
    ram_budget_bytes: int | None = None
    """Per rank; see `ChosenOffload`."""
    gradients_on_nvme: bool = False


def place(
    zero: Mapping[str, Any],
    outcore: Mapping[str, Any],
    settings: DeepSpeedSettings,
    model: WeightCounts,
    run: RunFacts,
    precision: Precision,
    notes: Notes,
    nvme_check: NvmeCheck,
    costs: OffloadCosts = STOCK_COSTS,
    budgeted_drive_bytes: Callable[[Placement], int] | None = None,
) -> Placement:
    """Decide the ZeRO stage and the homes of optimizer states and parameters.

    `budgeted_drive_bytes`: of one rank on the drive when a RAM budget keeps a part of it off; without it, or without a
    budget, the drive must have room for all that may go there.

    Raises:
        ValueError: contradictory settings, or an unusable drive under `strict_offload`.
    """
    name = stage_name(zero, settings, outcore, notes)
    stage = STAGES[name]
    optimizer, params = wanted_devices(name, zero, settings, notes)
    flags_say_nvme = name == "infinity" or "nvme" in (settings.offload_optimizer, settings.offload_params)
    if "nvme" in (optimizer, params) and not flags_say_nvme and outcore.get("residency") == "ram":
        raise ValueError(
            "deepspeed_config.json: outcore.residency ram contradicts the device nvme in zero_optimization. Set "
            "residency "
            "to auto or nvme, or the device to cpu."
        )
    path = nvme_path_of(zero, outcore, settings, notes)
    budget_bytes = _budget_bytes(outcore, costs, notes)
    if stage == 3 and name != "infinity" and path and outcore.get("residency", "auto") == "auto":
        ram_bytes = budget_bytes if budget_bytes is not None else run.ram_available_bytes
        spilled = _spill(optimizer, params, settings, model, run, ram_bytes, costs, notes)
        if costs.is_partial and spilled != (optimizer, params) and ram_bytes is not None and budget_bytes is None:
            budget_bytes = max(0, ram_bytes - RAM_RESERVE_BYTES)
        optimizer, params = spilled
    gradients_on_nvme = outcore["nvme_offload_gradients"] and _gradients_may_go(name, optimizer, costs, notes)
    if "nvme" not in (optimizer, params):
        if settings.nvme_offload_path and settings.was_given("nvme_offload_path"):
            notes.warn(
                f"nvme_offload_path {settings.nvme_offload_path} is not used: nothing is offloaded to NVMe with "
                f"zero_stage {name}, offload_optimizer {optimizer}, offload_params {params}."
            )
        return Placement(stage, optimizer, params, None)
    per_rank = None if budget_bytes is None else budget_bytes // run.local_ranks
    placement = Placement(stage, optimizer, params, None, per_rank, gradients_on_nvme)
    on_drive = nvme_bytes(model, precision, optimizer == "nvme", params == "nvme", costs.nvme_optimizer)
    if budgeted_drive_bytes is not None and per_rank is not None:
        on_drive = budgeted_drive_bytes(placement) * run.world_size
    required_gb = SPACE_SAFETY * on_drive / GB
    required_gb *= run.local_ranks / run.world_size
    usable, message, folder = _check_path(path, required_gb, run, nvme_check)
    if usable:
        notes.lines.append(f"NVMe: {message}")
        return replace(placement, nvme_path=str(folder))
    return fall_back(
        Placement(stage, optimizer, params, None, gradients_on_nvme=gradients_on_nvme), message, settings, notes
    )


def fall_back(placement: Placement, reason: str, settings: DeepSpeedSettings, notes: Notes) -> Placement:
    """RAM instead of the drive, said loudly; ValueError under `strict_offload`."""
    if settings.strict_offload:
        raise ValueError(f"strict_offload: offloading to NVMe is not possible. {reason}")
    moved = [
        what
        for what, device in (("optimizer states", placement.optimizer), ("parameters", placement.params))
        if device == "nvme"
    ]
    if placement.gradients_on_nvme:
        moved.append("gradients")
    notes.warn(
        f"NVMe OFFLOAD IS NOT USED: {reason} Falling back to RAM for {' and '.join(moved)}; "
        "--strict_offload makes this an error."
    )
    return Placement(
        placement.stage,
        "cpu" if placement.optimizer == "nvme" else placement.optimizer,
        "cpu" if placement.params == "nvme" else placement.params,
        None,
    )


def stage_name(zero: Mapping[str, Any], settings: DeepSpeedSettings, outcore: Mapping[str, Any], notes: Notes) -> str:
    """The ZeRO stage by name: the flag, else outcore.residency nvme, else the file's, else zero3."""
    in_file = zero.get("stage")
    if in_file is not None and (isinstance(in_file, bool) or in_file not in (0, 1, 2, 3)):
        raise ValueError(f"deepspeed_config.json: zero_optimization.stage must be 0, 1, 2 or 3, got {in_file!r}.")
    name = settings.zero_stage
    if name is not None:
        if in_file is not None and STAGES[str(name)] != in_file:
            notes.lines.append(
                f"zero_optimization.stage = {STAGES[str(name)]}: zero_stage {name} wins over the file's."
            )
        return str(name)
    if outcore.get("residency", "auto") == "nvme" and in_file in (None, 3):
        notes.chose("zero_stage", "infinity", "outcore.residency is nvme")
        return "infinity"
    if in_file is None:
        notes.chose("zero_optimization.stage", 3, "neither zero_stage nor the file says; zero3 fits the largest models")
        return "zero3"
    return ("none", "zero1", "zero2", "zero3")[in_file]


def wanted_devices(
    name: str, zero: Mapping[str, Any], settings: DeepSpeedSettings, notes: Notes
) -> tuple[Device, Device]:
    """The homes of optimizer states and parameters that were asked for. ValueError for contradictions."""
    if name == "infinity":
        return _wanted_by_infinity(zero, settings, notes)
    stage = STAGES[name]
    optimizer = _chosen_or(settings.offload_optimizer, _device_of(zero, "offload_optimizer"))
    params = _chosen_or(settings.offload_params, _device_of(zero, "offload_param"))
    if stage < 3:
        if settings.offload_params not in ("auto", "none"):
            raise ValueError(
                f"offload_params {settings.offload_params} needs zero_stage zero3 or infinity: only ZeRO-3 partitions "
                f"parameters; zero_stage is {name}."
            )
        if params not in (None, "none"):
            notes.dropped("zero_optimization.offload_param", f"only ZeRO-3 offloads parameters; zero_stage is {name}")
        params = "none"
    if stage == 0:
        if settings.offload_optimizer not in ("auto", "none"):
            raise ValueError(
                f"offload_optimizer {settings.offload_optimizer} needs zero_stage zero1 or higher; zero_stage is none."
            )
        if optimizer not in (None, "none"):
            notes.dropped("zero_optimization.offload_optimizer", "zero_stage is none")
        optimizer = "none"
    if stage in (1, 2) and optimizer == "nvme":
        raise ValueError(
            f"offload_optimizer nvme needs zero_stage zero3 or infinity: with {name} DeepSpeed would quietly keep the "
            "states in RAM. Use --offload_optimizer cpu or another stage."
        )
    default: Device = "cpu" if stage == 3 else "none"
    for what, value in (("optimizer states", optimizer), ("parameters", params)):
        if stage == 3 and value is None:
            notes.chose(f"home of {what}", "RAM", "default of zero3: it fits larger models than the GPU's memory")
    return optimizer or default, params or default


def _wanted_by_infinity(zero: Mapping[str, Any], settings: DeepSpeedSettings, notes: Notes) -> tuple[Device, Device]:
    homes: list[Device] = []
    parts: tuple[tuple[str, str, bool, OffloadChoice], ...] = (
        ("optimizer", "offload_optimizer", settings.nvme_offload_optimizer, settings.offload_optimizer),
        ("params", "offload_param", settings.nvme_offload_params, settings.offload_params),
    )
    for suffix, key, on_nvme, choice in parts:
        if on_nvme and choice in ("none", "cpu"):
            raise ValueError(
                f"zero_stage infinity with nvme_offload_{suffix} and offload_{suffix} {choice} contradict each other. "
                f"Add --nvme_offload_{suffix} false, or leave offload_{suffix} out."
            )
        if not on_nvme and choice == "nvme":
            raise ValueError(
                f"nvme_offload_{suffix} false and offload_{suffix} nvme contradict each other. Leave one of them out."
            )
        in_file = _device_of(zero, key)
        if on_nvme:
            homes.append("nvme")
        else:
            homes.append(_chosen_or(choice, "none" if in_file == "none" else "cpu") or "cpu")
    if "nvme" not in homes:
        notes.warn(
            "zero_stage infinity with neither optimizer nor parameters on NVMe is ZeRO-3 with offload to RAM. "
            "Leave nvme_offload_optimizer or nvme_offload_params on to use the drive."
        )
    return homes[0], homes[1]


def _chosen_or(choice: OffloadChoice, otherwise: Device | None) -> Device | None:
    return otherwise if choice == "auto" else choice


def _device_of(zero: Mapping[str, Any], key: str) -> Device | None:
    block = zero.get(key)
    if block is None:
        return None
    device = block.get("device")
    if device is None:
        return "none"
    if device not in ("none", "cpu", "nvme"):
        raise ValueError(
            f"deepspeed_config.json: zero_optimization.{key}.device must be none, cpu or nvme, got {device!r}."
        )
    return device


def nvme_path_of(
    zero: Mapping[str, Any], outcore: Mapping[str, Any], settings: DeepSpeedSettings, notes: Notes
) -> str | None:
    """The drive's folder: the flag, else the offload blocks', else outcore.nvme_path."""
    if settings.nvme_offload_path:
        return settings.nvme_offload_path
    paths = {
        key: block["nvme_path"]
        for key in ("offload_optimizer", "offload_param")
        if (block := zero.get(key)) and block.get("nvme_path")
    }
    if len(set(paths.values())) > 1:
        notes.warn(
            f"offload_param.nvme_path {paths['offload_param']} and offload_optimizer.nvme_path "
            f"{paths['offload_optimizer']} differ; both are used as {paths['offload_optimizer']} (space is checked "
            "there)."
        )
    return next(iter(paths.values()), None) or outcore.get("nvme_path") or None


def _budget_bytes(outcore: Mapping[str, Any], costs: OffloadCosts, notes: Notes) -> int | None:
    """outcore.ram_budget_gib, of the whole host."""
    budget_gib = outcore.get("ram_budget_gib")
    if budget_gib is None:
        return None
    if not costs.is_partial:
        notes.dropped("outcore.ram_budget_gib", "stock DeepSpeed keeps all states in RAM or all of them on the drive")
        return None
    return int(budget_gib * GIB)


def _spill(
    optimizer: Device,
    params: Device,
    settings: DeepSpeedSettings,
    model: WeightCounts,
    run: RunFacts,
    ram_bytes: int | None,
    costs: OffloadCosts,
    notes: Notes,
) -> tuple[Device, Device]:
    """RAM first, the drive when RAM is too small; never against an explicit choice."""
    if ram_bytes is None or optimizer != "cpu" or settings.offload_optimizer == "cpu":
        return optimizer, params
    local_share = run.local_ranks / run.world_size
    need_bytes = int(costs.ram * model.trainable * local_share) + costs.ram_overhead * run.local_ranks
    if need_bytes <= ram_bytes:
        return optimizer, params
    rest_bytes = int(costs.ram_optimizer_on_nvme * model.total_params * local_share)
    spill_params = params == "cpu" and settings.offload_params != "cpu" and rest_bytes > ram_bytes
    who = "here" if costs.is_partial else "with DeepSpeed"
    what = "What does not fit of the optimizer states goes" if costs.is_partial else "Optimizer states go"
    notes.warn(
        f"Spilling to NVMe: all in RAM needs about {format_gib(need_bytes)} {who} ({costs.ram:g} B per parameter and "
        f"{format_gib(costs.ram_overhead)}), {format_gib(ram_bytes)} are available. {what} to the drive"
        f"{' and parameters too' if spill_params else ', parameters stay in RAM'}."
    )
    return "nvme", "nvme" if spill_params else params


def wants_gradients_on_nvme(outcore: Mapping[str, Any], settings: DeepSpeedSettings, notes: Notes) -> bool:
    """The flag where the user gave it, else outcore.nvme_offload_gradients."""
    in_file, flag = outcore["nvme_offload_gradients"], settings.nvme_offload_gradients
    if not settings.was_given("nvme_offload_gradients"):
        return in_file
    if in_file and not flag:
        notes.lines.append("outcore.nvme_offload_gradients = false: --nvme_offload_gradients wins over the file's true")
    return flag


def _gradients_may_go(name: str, optimizer: Device, costs: OffloadCosts, notes: Notes) -> bool:
    """Whether this run keeps gradients on the drive, with a note; ValueError where it makes no sense."""
    if optimizer != "nvme":
        raise ValueError(
            "nvme_offload_gradients needs the optimizer on NVMe as well (zero_stage infinity with "
            "nvme_offload_optimizer "
            f"true); zero_stage is {name} and the optimizer states live on {optimizer}."
        )
    if costs.is_partial:
        notes.lines.append(
            "nvme_offload_gradients: gradients go to the drive as backward produces them, and come back for each "
            "further micro-batch and for the optimizer: slower, and only for want of 2 bytes of RAM per parameter"
        )
        return True
    notes.warn(
        "nvme_offload_gradients changes nothing in DeepSpeed: it has no such setting. With the optimizer on NVMe its "
        "fp32 "
        "gradients travel to the drive and back in every step anyway, and 2 bytes per parameter of them stay in RAM."
    )
    return False


def _check_path(
    path: str | None, required_gb: float, run: RunFacts, nvme_check: NvmeCheck
) -> tuple[bool, str, Path | None]:
    if not path:
        return (
            False,
            "No NVMe path is given (--nvme_offload_path, or outcore.nvme_path in deepspeed_config.json).",
            None,
        )
    try:
        folder = resolve_nvme_path(path)
    except NvmePathError as error:
        return False, str(error), None
    if run.run_name:
        folder = folder / run.run_name
    usable, message = nvme_check(str(folder), required_gb)
    if usable:
        message += f" DeepSpeed needs about {format_gb(required_gb * GB)} there."
    return usable, message, folder
