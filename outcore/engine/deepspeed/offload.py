"""Homes of optimizer states and parameters: what was asked for, the drive's state and free RAM.

Only outcore's staged offload puts anything on a drive. DeepSpeed's own loses states when a run is resumed and never
checks its transfers, so that what would take it falls back to RAM.

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
    describe_folder,
    resolve_nvme_paths,
)
from outcore.sizing.streaming import RAM_RESERVE_BYTES
from outcore.sizing.swapping import WeightCounts, nvme_bytes

NvmeCheck = Callable[[str, float], tuple[bool, str]]
"""(path, required GB) -> (usable, message), as `validate_nvme_path`."""


@dataclass(frozen=True)
class OffloadCosts:
    """Bytes per parameter that the staged offload takes, for deciding what fits where."""

    ram: float
    """Everything in RAM."""
    ram_overhead: int
    """Bytes of RAM per rank in addition to the parameters."""
    ram_optimizer_on_nvme: float
    nvme_optimizer: float
    """On the drive, per trainable parameter."""


NOT_BY_DEEPSPEED = (
    "DeepSpeed's own NVMe offload is not used: it loses the optimizer's states when a run is resumed, and never checks "
    "what it reads. Leave out what asks for it (outcore.offload stock, or the key that is named above)."
)
WITH_THE_OPTIMIZER = "parameters go to a drive only with an optimizer in RAM or there (--offload_optimizer cpu)."
STAGES = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "infinity": 3}


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
    costs: OffloadCosts | None,
    budgeted_drive_bytes: Callable[[OffloadPlacement], int],
) -> OffloadPlacement:
    """Decide the homes of optimizer states and parameters.

    `costs`: None where DeepSpeed itself is to move what is offloaded, which then stays in RAM.
    `budgeted_drive_bytes`: of one rank on the drive when a RAM budget keeps a part of it off; without a budget the
    drive must have room for all that may go there.

    Raises:
        ValueError: gradients on a drive that has no states, or an unusable drive under `strict_offload`."""
    wanted, stage = settings.offload, STAGES[settings.zero_stage]
    optimizer, params = wanted.optimizer, wanted.params
    if settings.zero_stage == "infinity" and "nvme" not in (optimizer, params):
        notes.warn(
            "zero_stage infinity with neither optimizer nor parameters on NVMe is ZeRO-3 with offload to RAM. "
            "Leave nvme_offload_optimizer or nvme_offload_params on to use the drive."
        )
    budget_bytes = None if wanted.ram_budget_gib is None else int(wanted.ram_budget_gib * GIB)
    if costs is None and budget_bytes is not None:
        notes.dropped("ram_budget_gib", "stock DeepSpeed keeps all states in RAM")
        budget_bytes = None
    may_spill = stage == 3 and settings.zero_stage != "infinity" and wanted.nvme_path and wanted.residency == "auto"
    if costs is not None and may_spill:
        ram_bytes = budget_bytes if budget_bytes is not None else run.ram_available_bytes
        spilled = _spill(wanted, model, run, ram_bytes, costs, notes)
        if spilled != (optimizer, params) and ram_bytes is not None and budget_bytes is None:
            budget_bytes = max(0, ram_bytes - RAM_RESERVE_BYTES)
        optimizer, params = spilled
    gradients_on_nvme = wanted.gradients_on_nvme
    if gradients_on_nvme:
        _check_gradients(settings.zero_stage, optimizer, costs, notes)
    if "nvme" not in (optimizer, params):
        if wanted.nvme_path and wanted.path_is_asked:
            notes.warn(
                f"nvme_offload_path {wanted.nvme_path} is not used: nothing is offloaded to NVMe with "
                f"zero_stage {settings.zero_stage}, offload_optimizer {optimizer}, offload_params {params}."
            )
        return OffloadPlacement(stage, optimizer, params, None)
    per_rank = None if budget_bytes is None else budget_bytes // run.local_ranks
    placement = OffloadPlacement(stage, optimizer, params, None, per_rank, gradients_on_nvme)
    if costs is None or optimizer == "none":
        return fall_back(placement, NOT_BY_DEEPSPEED if costs is None else WITH_THE_OPTIMIZER, wanted, notes)
    on_drive = nvme_bytes(model, settings.precision, optimizer == "nvme", params == "nvme", costs.nvme_optimizer)
    if per_rank is not None:
        on_drive = budgeted_drive_bytes(placement) * run.world_size
    required_gb = SPACE_SAFETY * on_drive / GB
    required_gb *= run.local_ranks / run.world_size
    usable, message, folders = _check_path(wanted.nvme_path, required_gb, run, nvme_check)
    if usable:
        notes.lines.append(f"NVMe: {message}")
        return replace(placement, nvme_path=str(folders[0]), drives=tuple(map(str, folders)))
    return fall_back(placement, message, wanted, notes)


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
    notes.warn(
        f"Spilling to NVMe: all in RAM needs about {format_gib(need_bytes)} here ({costs.ram:g} B per parameter and "
        f"{format_gib(costs.ram_overhead)}), {format_gib(ram_bytes)} are available. What does not fit of the optimizer "
        "states goes to the drive"
        f"{' and parameters too' if spill_params else ', parameters stay in RAM'}."
    )
    return "nvme", "nvme" if spill_params else params


def _check_gradients(name: str, optimizer: Device, costs: OffloadCosts | None, notes: Notes) -> None:
    """Note what gradients on the drive cost; ValueError where they cannot go there."""
    if optimizer != "nvme":
        raise ValueError(
            "nvme_offload_gradients needs the optimizer on NVMe as well (zero_stage infinity with "
            "nvme_offload_optimizer "
            f"true); zero_stage is {name} and the optimizer states live on {optimizer}."
        )
    if costs is None:
        raise ValueError(
            "nvme_offload_gradients: stock DeepSpeed has no such setting. Leave it out, or let outcore move what is "
            "offloaded (--deepspeed_offload staged)."
        )
    notes.lines.append(
        "nvme_offload_gradients: gradients go to the drive as backward produces them, and come back for each "
        "further micro-batch and for the optimizer: slower, and only for want of 2 bytes of RAM per parameter"
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
