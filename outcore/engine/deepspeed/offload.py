"""Homes of optimizer states and parameters: what was asked for, the drive's state and free RAM.

An unusable drive means RAM (or an error with `strict_offload`); states that do not fit the RAM spill to the drive when
there is one (residency auto)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from outcore.common.quantities import GB, GIB, format_gb, format_gib
from outcore.config import Device, Offload, RunSettings
from outcore.engine.deepspeed.settings import Notes, RunFacts
from outcore.machine.offload import (
    SPACE_SAFETY,
    NvmePathError,
    check_direct_io,
    describe_folder,
    resolve_nvme_paths,
    validate_nvme_path,
)
from outcore.sizing.streaming import RAM_RESERVE_BYTES
from outcore.sizing.swapping import (
    NVME_RAM_BYTES_PER_PARAM,
    RAM_BYTES_PER_PARAM,
    RAM_OVERHEAD_BYTES,
    WeightCounts,
    nvme_bytes,
)

NvmeCheck = Callable[[str, float], tuple[bool, str]]
"""(path, required GB) -> (usable, message), as `validate_nvme_path`."""


@dataclass(frozen=True)
class OffloadCosts:
    """Bytes per parameter that an offload engine takes, for deciding what fits where."""

    ram: float
    """Everything in RAM."""
    ram_overhead: int
    """Bytes of RAM per rank in addition to the parameters."""
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
STAGES = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "infinity": 3}


def usable_for_deepspeed(path: str, required_space_gb: float) -> tuple[bool, str]:
    """`validate_nvme_path` and, since stock DeepSpeed depends on them, direct transfers in steps of 1 KiB."""
    ok, message = validate_nvme_path(path, required_space_gb)
    if not ok:
        return ok, message
    direct_ok, reason = check_direct_io(path)
    if not direct_ok:
        return False, f"DeepSpeed cannot offload to {path}: {reason}. Choose a folder on a local NVMe drive."
    return True, message


@dataclass(frozen=True)
class OffloadPlacement:
    """The decided stage and homes."""

    stage: int
    optimizer: Device
    params: Device
    nvme_path: str | None
    ram_budget_bytes: int | None = None
    """Per rank; see `ChosenOffload`."""
    gradients_on_nvme: bool = False
    drives: tuple[str, ...] = ()


def place(
    settings: RunSettings,
    model: WeightCounts,
    run: RunFacts,
    notes: Notes,
    nvme_check: NvmeCheck,
    costs: OffloadCosts = STOCK_COSTS,
    budgeted_drive_bytes: Callable[[OffloadPlacement], int] | None = None,
) -> OffloadPlacement:
    """Decide the homes of optimizer states and parameters.

    `budgeted_drive_bytes`: of one rank on the drive when a RAM budget keeps a part of it off; without it, or without a
    budget, the drive must have room for all that may go there.

    Raises:
        ValueError: gradients on a drive that has no states, or an unusable drive under `strict_offload`."""
    wanted, stage = settings.offload, STAGES[settings.zero_stage]
    optimizer, params = wanted.optimizer, wanted.params
    if settings.zero_stage == "infinity" and "nvme" not in (optimizer, params):
        notes.warn(
            "zero_stage infinity with neither optimizer nor parameters on NVMe is ZeRO-3 with offload to RAM. "
            "Leave nvme_offload_optimizer or nvme_offload_params on to use the drive."
        )
    budget_bytes = _budget_bytes(wanted, costs, notes)
    if stage == 3 and settings.zero_stage != "infinity" and wanted.nvme_path and wanted.residency == "auto":
        ram_bytes = budget_bytes if budget_bytes is not None else run.ram_available_bytes
        spilled = _spill(wanted, model, run, ram_bytes, costs, notes)
        if costs.is_partial and spilled != (optimizer, params) and ram_bytes is not None and budget_bytes is None:
            budget_bytes = max(0, ram_bytes - RAM_RESERVE_BYTES)
        optimizer, params = spilled
    gradients_on_nvme = wanted.gradients_on_nvme and _gradients_may_go(settings.zero_stage, optimizer, costs, notes)
    if "nvme" not in (optimizer, params):
        if wanted.nvme_path and wanted.path_is_asked:
            notes.warn(
                f"nvme_offload_path {wanted.nvme_path} is not used: nothing is offloaded to NVMe with "
                f"zero_stage {settings.zero_stage}, offload_optimizer {optimizer}, offload_params {params}."
            )
        return OffloadPlacement(stage, optimizer, params, None)
    per_rank = None if budget_bytes is None else budget_bytes // run.local_ranks
    placement = OffloadPlacement(stage, optimizer, params, None, per_rank, gradients_on_nvme)
    on_drive = nvme_bytes(model, settings.precision, optimizer == "nvme", params == "nvme", costs.nvme_optimizer)
    if budgeted_drive_bytes is not None and per_rank is not None:
        on_drive = budgeted_drive_bytes(placement) * run.world_size
    required_gb = SPACE_SAFETY * on_drive / GB
    required_gb *= run.local_ranks / run.world_size
    usable, message, folders = _check_path(wanted.nvme_path, required_gb, run, nvme_check)
    if usable:
        notes.lines.append(f"NVMe: {message}")
        return replace(placement, nvme_path=str(folders[0]), drives=tuple(map(str, folders)))
    return fall_back(
        OffloadPlacement(stage, optimizer, params, None, gradients_on_nvme=gradients_on_nvme), message, wanted, notes
    )


def fall_back(placement: OffloadPlacement, reason: str, wanted: Offload, notes: Notes) -> OffloadPlacement:
    """RAM instead of the drive, said loudly; ValueError under `strict_offload`."""
    if wanted.strict:
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
    return OffloadPlacement(
        placement.stage,
        "cpu" if placement.optimizer == "nvme" else placement.optimizer,
        "cpu" if placement.params == "nvme" else placement.params,
        None,
    )


def _budget_bytes(wanted: Offload, costs: OffloadCosts, notes: Notes) -> int | None:
    """The RAM budget, of the whole host."""
    if wanted.ram_budget_gib is None:
        return None
    if not costs.is_partial:
        notes.dropped("ram_budget_gib", "stock DeepSpeed keeps all states in RAM or all of them on the drive")
        return None
    return int(wanted.ram_budget_gib * GIB)


def _spill(
    wanted: Offload, model: WeightCounts, run: RunFacts, ram_bytes: int | None, costs: OffloadCosts, notes: Notes
) -> tuple[Device, Device]:
    """RAM first, the drive when RAM is too small; never against an explicit choice."""
    optimizer, params = wanted.optimizer, wanted.params
    if ram_bytes is None or optimizer != "cpu" or not wanted.optimizer_may_spill:
        return optimizer, params
    local_share = run.local_ranks / run.world_size
    need_bytes = int(costs.ram * model.trainable * local_share) + costs.ram_overhead * run.local_ranks
    if need_bytes <= ram_bytes:
        return optimizer, params
    rest_bytes = int(costs.ram_optimizer_on_nvme * model.total_params * local_share)
    spill_params = params == "cpu" and wanted.params_may_spill and rest_bytes > ram_bytes
    who = "here" if costs.is_partial else "with DeepSpeed"
    what = "What does not fit of the optimizer states goes" if costs.is_partial else "Optimizer states go"
    notes.warn(
        f"Spilling to NVMe: all in RAM needs about {format_gib(need_bytes)} {who} ({costs.ram:g} B per parameter and "
        f"{format_gib(costs.ram_overhead)}), {format_gib(ram_bytes)} are available. {what} to the drive"
        f"{' and parameters too' if spill_params else ', parameters stay in RAM'}."
    )
    return "nvme", "nvme" if spill_params else params


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
    raise ValueError(
        "nvme_offload_gradients: stock DeepSpeed has no such setting. Leave it out, or let outcore move what is "
        "offloaded (--deepspeed_offload staged)."
    )


def _check_path(
    path: str | None, required_gb: float, run: RunFacts, nvme_check: NvmeCheck
) -> tuple[bool, str, tuple[Path, ...]]:
    """(usable, message, a folder on each drive that a rank of this host takes)."""
    if not path:
        return (
            False,
            "No NVMe path is given (--nvme_offload_path, or outcore.nvme_path in deepspeed_config.json).",
            (),
        )
    try:
        folders = resolve_nvme_paths(path)[: run.local_ranks]
    except NvmePathError as error:
        return False, str(error), ()
    said = [f"{path}: one drive a rank, so one is used."] if len(folders) < path.count(",") + 1 else []
    required_gb *= -(-run.local_ranks // len(folders)) / run.local_ranks
    if run.run_name:
        folders = tuple(folder / run.run_name for folder in folders)
    for folder in folders:
        usable, message = nvme_check(str(folder), required_gb)
        if not usable:
            return False, message, folders
        needs = f"DeepSpeed needs about {format_gb(required_gb * GB)} there, a margin of half included."
        said += [part for part in (describe_folder(folder), needs, message) if part]
    return True, " ".join(said), folders
