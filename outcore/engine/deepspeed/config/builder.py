"""DeepSpeed's configuration, generated from `RunSettings`: no "auto" in it, no value that DeepSpeed 0.19.8 crashes on.

    built = build_config(settings, model, run)
    built.config    dict for deepspeed.initialize / HfDeepSpeedConfig
    built.notes     a line per setting (with its reason), per changed user value, per fallback
    built.warnings  those notes that must be shown loudly
    built.offload   where things really live: stage, optimizer, params ("none"|"cpu"|"nvme"), nvme_path

What of deepspeed_config.json only DeepSpeed reads passes through, except where DeepSpeed would crash or corrupt data:
that is raised, with a note. The NVMe folder is created, written to and read back (`nvme_check`), nothing else has side
effects. With several ranks on a host, let one rank build and broadcast the result, so that all take the same fallback.

DeepSpeed's own traps here: "Adam" means AdamW unless adam_w_mode says otherwise; AdamW without offload wants a compiled
extension unless torch_adam is set."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outcore.config import RunSettings
from outcore.engine.deepspeed.config.zero_section import zero_section
from outcore.engine.deepspeed.offload import NvmeCheck, OffloadPlacement, place
from outcore.engine.deepspeed.settings import BuiltConfig, ChosenOffload, Notes, RunFacts
from outcore.engine.deepspeed.staged.plan import can_stage, drive_bytes, staged_costs
from outcore.machine.offload import validate_nvme_path
from outcore.optim import check_eps, state_format
from outcore.sizing.swapping import WeightCounts
from outcore.storage import DriveAccess

GENERATED = frozenset({"optimizer", "scheduler", "bf16", "fp16", "zero_optimization", "aio", "outcore", "data_types"})
"""Blocks that are made here, not passed through; the training loop sets the learning rate itself."""
STEPS_PER_PRINT = 10**9
"""DeepSpeed's own progress lines are off: the training loop prints better ones."""


def precision_section(settings: RunSettings) -> dict[str, Any]:
    """The blocks of the precision; exactly one of bf16 and fp16 is enabled, or neither for fp32."""
    if settings.precision == "bf16":
        return {"bf16": {**settings.file.get("bf16", {}), "enabled": True}}
    if settings.precision == "fp32":
        return {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
    scaling = settings.loss_scaling
    scale = {
        "loss_scale": 0,
        **settings.file.get("fp16", {}),
        "initial_scale_power": scaling.initial_power,
        "loss_scale_window": scaling.window,
        "hysteresis": scaling.hysteresis,
        "min_loss_scale": scaling.minimum,
    }
    return {"fp16": {**scale, "enabled": True}}


def aio_section(settings: RunSettings, notes: Notes) -> dict[str, Any]:
    """The aio block: DeepSpeed's drive transfers."""
    block = settings.file.get("aio", {})
    if "thread_count" in block:
        notes.dropped("aio.thread_count", "DeepSpeed 0.19.8 ignores it; the key is intra_op_parallelism")
    return {
        "block_size": settings.offload.aio_block_size,
        "queue_depth": settings.offload.aio_queue_depth,
        "intra_op_parallelism": block.get("intra_op_parallelism", 1),
        "single_submit": block.get("single_submit", False),
        "overlap_events": block.get("overlap_events", True),
        "use_gds": False,
    }


def optimizer_section(
    settings: RunSettings, placement: OffloadPlacement, run: RunFacts, notes: Notes
) -> dict[str, Any]:
    """AdamW: torch's own where states stay on the GPU, DeepSpeed's CPU AdamW where they are offloaded."""
    params = dict(settings.file.get("optimizer.params", {}))
    is_adam = str(settings.file.get("optimizer.type", "AdamW")).lower() == "adam"
    resolved: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": [settings.adam_beta1, settings.adam_beta2],
        "eps": settings.adam_epsilon,
        "weight_decay": settings.weight_decay,
    }
    if is_adam:
        resolved["adam_w_mode"] = bool(params.get("adam_w_mode", True))
    if placement.optimizer == "none":
        resolved.update(_torch_adam(params, run, notes))
        return {"optimizer": {"type": "Adam" if is_adam else "AdamW", "params": resolved}}
    if params.get("torch_adam"):
        notes.changed(
            "optimizer.params.torch_adam", True, False, "offloaded states are updated by DeepSpeed's CPU AdamW"
        )
    if settings.precision != "fp32" and "fp32_optimizer_states" in params:
        resolved["fp32_optimizer_states"] = params["fp32_optimizer_states"]
    if "bias_correction" in params:
        resolved["bias_correction"] = params["bias_correction"]
    return {"optimizer": {"type": "Adam" if is_adam else "AdamW", "params": resolved}}


def _torch_adam(params: Mapping[str, Any], run: RunFacts, notes: Notes) -> dict[str, Any]:
    if run.device == "cuda" and params.get("torch_adam") is False:
        notes.warn(
            "optimizer.params.torch_adam false: DeepSpeed compiles its fused_adam extension at the first step (nvcc)."
        )
        return {"bias_correction": params["bias_correction"]} if "bias_correction" in params else {}
    resolved: dict[str, Any] = {"torch_adam": True}
    if run.device == "cuda":
        resolved["fused"] = bool(params.get("fused", not params.get("foreach", False)))
        if "torch_adam" not in params:
            notes.chose("optimizer.params.torch_adam", True, "torch's fused AdamW; no extension to compile")
    elif params.get("torch_adam") is False:
        notes.changed("optimizer.params.torch_adam", False, True, "the fused extension is for GPUs")
    if params.get("foreach") is not None and not resolved.get("fused"):
        resolved["foreach"] = params["foreach"]
    return resolved


def build_config(
    settings: RunSettings,
    model: WeightCounts,
    run: RunFacts,
    *,
    nvme_check: NvmeCheck = validate_nvme_path,
    staged: bool = True,
) -> BuiltConfig:
    """DeepSpeed's configuration of these settings for this model and run; see the module docstring.

    `staged`: offloaded states and parameters will be moved by outcore (`staged/`), not by DeepSpeed. Where the file
    asks for something that only DeepSpeed's own offload does, a note says so and `offload.staged` is False: then what
    is offloaded stays in RAM.

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
    costs = staged_costs(states, settings, settings.offload.gradients_on_nvme) if staged else None
    aio = aio_section(settings, notes)

    def budgeted_drive_bytes(chosen: OffloadPlacement) -> int:
        block = zero_section(settings, chosen, aio, model, run, Notes(), staged=True)
        return drive_bytes(settings, _chosen(chosen, states, block, staged=True), model, run)

    placement = place(settings, model, run, notes, nvme_check, costs, budgeted_drive_bytes)
    staged = staged and placement.stage == 3 and placement.optimizer in ("cpu", "nvme")
    zero = zero_section(settings, placement, aio, model, run, notes, staged=staged)
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
    offload = _chosen(placement, states, zero, staged=staged)
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


def _chosen(placement: OffloadPlacement, states: str, zero: dict[str, Any], *, staged: bool) -> ChosenOffload:
    on_gpu = ("stage3_max_live_parameters", "stage3_prefetch_bucket_size")
    live = sum(int(zero[key]) for key in on_gpu) if placement.params == "nvme" else 0
    return ChosenOffload(
        placement.stage, placement.optimizer, placement.params, placement.nvme_path,
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


def check_by_deepspeed(config: dict[str, Any]) -> None:
    """Let DeepSpeed's own parser read the resolved configuration (1 ms). ValueError naming the key it stumbles over."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    def refusal(some: dict[str, Any]) -> Exception | None:
        try:
            DeepSpeedConfig(copy.deepcopy(some))
        except Exception as error:  # AttributeError, TypeError, AssertionError ...: whatever it trips over
            return error
        return None

    error = refusal(config)
    if error is None:
        return
    culprits = [key for key in config if refusal({k: v for k, v in config.items() if k != key}) is None]
    where = culprits if len(culprits) == 1 else []
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        inner = [str(part) for part in first["loc"]]
        where = inner if inner[:1] == where else [*where, *inner]
        what = f"{first['msg']}, got {first['input']!r}"
    elif where:
        what += f" (its value is {config[where[0]]!r})"
    raise ValueError(
        f"deepspeed_config.json: DeepSpeed cannot read {'.'.join(where) or 'the configuration'}: {what}. Correct the "
        "value or delete the key."
    )
