"""DeepSpeed's configuration, generated from `RunSettings`: no "auto" in it, no value that DeepSpeed 0.19.8 crashes on.

    built = build_config(settings, model, run)
    built.config    dict for deepspeed.initialize / HfDeepSpeedConfig
    built.notes     a line per setting (with its reason), per changed user value, per fallback
    built.warnings  those notes that must be shown loudly
    built.offload   where things really live: stage, optimizer, params ("none"|"cpu"|"nvme"), nvme_path, locked_bytes

What of deepspeed_config.json only DeepSpeed reads passes through, except where DeepSpeed would crash or corrupt data:
that is raised, with a note. The NVMe folder is created, written to and read back (`nvme_check`), nothing else has side
effects. With several ranks on a host, let one rank build and broadcast the result, so that all take the same fallback.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outcore.config import RunSettings
from outcore.engine.deepspeed.config.run_section import aio_section, optimizer_section, precision_section
from outcore.engine.deepspeed.config.zero_section import check_locked_bytes, zero_section
from outcore.engine.deepspeed.notes import Notes
from outcore.engine.deepspeed.offload import (
    STOCK_COSTS,
    NvmeCheck,
    OffloadPlacement,
    fall_back,
    place,
    usable_for_deepspeed,
)
from outcore.engine.deepspeed.settings import BuiltConfig, ChosenOffload, RunFacts
from outcore.engine.deepspeed.staged.choice import can_stage, staged_costs
from outcore.engine.deepspeed.staged.plan import drive_bytes
from outcore.optim import check_eps, state_format
from outcore.sizing.swapping import WeightCounts
from outcore.storage import DriveAccess

__all__ = ["BuiltConfig", "ChosenOffload", "RunFacts", "WeightCounts", "build_config"]

GENERATED = frozenset({"optimizer", "scheduler", "bf16", "fp16", "zero_optimization", "aio", "outcore", "data_types"})
"""Blocks that are made here, not passed through; the training loop sets the learning rate itself."""
STEPS_PER_PRINT = 10**9
"""DeepSpeed's own progress lines are off: the training loop prints better ones."""


def build_config(
    settings: RunSettings,
    model: WeightCounts,
    run: RunFacts,
    *,
    nvme_check: NvmeCheck = usable_for_deepspeed,
    staged: bool = False,
) -> BuiltConfig:
    """DeepSpeed's configuration of these settings for this model and run; see the module docstring.

    `staged`: offloaded states and parameters will be moved by outcore (`staged/`), not by DeepSpeed: none of its swap
    buffers are sized, and where the file asks for something that only DeepSpeed's own offload does, a note says so and
    `offload.staged` is False. The default makes a configuration that stock DeepSpeed can run.

    Raises:
        ValueError: what DeepSpeed cannot do for this stage or home, an unusable NVMe path under `strict_offload`.
    """
    notes = Notes()
    notes.lines += [*settings.words(), *settings.notes]
    for warning in settings.warnings:
        notes.warn(warning)
    if staged:
        staged = can_stage(settings, notes)
    states = settings.state_format if staged else "fp32"
    costs = staged_costs(states, settings, settings.offload.gradients_on_nvme) if staged else STOCK_COSTS
    aio = aio_section(settings, notes)

    def budgeted_drive_bytes(chosen: OffloadPlacement) -> int:
        block, _ = zero_section(settings, chosen, aio, model, run, Notes(), staged=True)
        return drive_bytes(settings, _chosen(chosen, 0, states, block, staged=True), model, run)

    placement = place(settings, model, run, notes, nvme_check, costs, budgeted_drive_bytes if staged else None)
    staged = staged and placement.stage == 3 and placement.optimizer in ("cpu", "nvme")
    zero, locked_bytes = zero_section(settings, placement, aio, model, run, notes, staged=staged)
    if placement.nvme_path is not None:
        problem = check_locked_bytes(locked_bytes, run)
        if problem:
            placement = fall_back(placement, problem, settings.offload, notes)
            zero, locked_bytes = zero_section(settings, placement, aio, model, run, notes)
    _check_combinations(settings, placement)
    config: dict[str, Any] = {
        "train_batch_size": settings.train_batch_size,
        "train_micro_batch_size_per_gpu": settings.per_device_train_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        **precision_section(settings),
        "zero_optimization": zero,
        **({"aio": aio} if placement.nvme_path is not None else {}),
        **optimizer_section(settings, placement, run, notes),
        "gradient_clipping": settings.max_grad_norm,
        **_data_types(settings),
    }
    for key, value in settings.file.blocks.items():
        if key not in GENERATED:
            config.setdefault(key, value)
    config.setdefault("steps_per_print", STEPS_PER_PRINT)
    config.setdefault("wall_clock_breakdown", False)
    if staged:
        check_eps(settings.adam_epsilon, state_format(states).moments8)
        config["zero_force_ds_cpu_optimizer"] = False  # the parameter groups come from outside, the step is ours
    offload = _chosen(placement, locked_bytes, states, zero, staged=staged)
    offload = replace(
        offload,
        nvme_checksums=settings.nvme_checksums,
        storage=DriveAccess(settings.storage_engine, settings.storage_threads, settings.storage_block_bytes),
    )
    if settings.transfer_path != "staged" and placement.params == "nvme":
        notes.lines.append(
            f"transfer_path {settings.transfer_path}: of the streaming engine; DeepSpeed gathers shares from RAM, so "
            "they come through pinned memory"
        )
    return BuiltConfig(config, tuple(notes.lines), offload, tuple(notes.warnings))


def _chosen(
    placement: OffloadPlacement, locked_bytes: int, states: str, zero: dict[str, Any], *, staged: bool
) -> ChosenOffload:
    on_gpu = ("stage3_max_live_parameters", "stage3_prefetch_bucket_size")
    live = sum(int(zero[key]) for key in on_gpu) if placement.params == "nvme" else 0
    return ChosenOffload(
        placement.stage, placement.optimizer, placement.params, placement.nvme_path, locked_bytes,
        staged, states, placement.ram_budget_bytes, staged and placement.gradients_on_nvme, live,
        placement.drives,
    )  # fmt: skip


def _data_types(settings: RunSettings) -> dict[str, Any]:
    block = dict(settings.file.get("data_types", {}))
    if settings.grad_accum_dtype is not None:
        block["grad_accum_dtype"] = settings.grad_accum_dtype
    return {"data_types": block} if block else {}


def _check_combinations(settings: RunSettings, placement: OffloadPlacement) -> None:
    """Keys outside zero_optimization on which DeepSpeed fails for this stage, precision or offload."""
    where, file, precision = "deepspeed_config.json: ", settings.file, settings.precision
    grads = settings.grad_accum_dtype
    if placement.stage == 0 and grads not in (None, precision):
        raise ValueError(
            f"{where}data_types.grad_accum_dtype {grads} needs zero_stage zero1 or higher; with zero_stage none "
            f"DeepSpeed accumulates gradients in {precision} only. Remove it or choose another stage."
        )
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads"):
        if file.get(f"{precision}.{key}") and (placement.stage < 3 or placement.optimizer != "cpu"):
            raise ValueError(
                f"{where}{precision}.{key} needs ZeRO-3 with optimizer states in RAM; here they are on "
                f"{placement.optimizer.replace('none', 'the GPU')} with stage {placement.stage}. Set it to false."
            )
    predivides = file.get("prescale_gradients") or file.get("gradient_predivide_factor", 1.0) != 1.0
    if placement.stage == 3 and predivides:
        raise ValueError(
            f"{where}prescale_gradients and gradient_predivide_factor do not work with ZeRO-3. Remove them."
        )
