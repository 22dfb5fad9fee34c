"""The zero_optimization block of the resolved configuration.

Bucket sizes are counted in elements; DeepSpeed's defaults (5e8 = 1 GB of GPU memory each in 16 bit, 1e9 parameters kept
alive) are made for data-centre GPUs, so smaller ones are chosen here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outcore.config import RunSettings
from outcore.engine.deepspeed.offload import (
    OffloadPlacement,
)
from outcore.engine.deepspeed.settings import Notes, RunFacts
from outcore.sizing.swapping import (
    BUCKET_NUMEL,
    LIVE_NUMEL,
    SUB_GROUP_NUMEL,
    Precision,
    WeightCounts,
    persistence_cap_numel,
)

PERSISTENCE_NUMEL = 100_000
"""Norms and biases stay on the GPU."""
STAGE3_ONLY = (
    "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "zero_hpz_partition_size",
    "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
    "memory_efficient_linear", "leaf_module",
)  # fmt: skip


def zero_section(
    settings: RunSettings,
    placement: OffloadPlacement,
    aio: Mapping[str, Any],
    model: WeightCounts,
    run: RunFacts,
    notes: Notes,
    *,
    staged: bool,
) -> dict[str, Any]:
    """The zero_optimization block. `staged`: outcore moves what is offloaded, else DeepSpeed, in RAM alone."""
    user_zero = settings.file.get("zero_optimization", {})
    zero = {
        key: value for key, value in user_zero.items() if key not in ("stage", "offload_optimizer", "offload_param")
    }
    _check_numbers(zero)
    _refuse(zero, user_zero, placement, run, notes)
    zero["stage"] = placement.stage
    if placement.stage == 0:
        return {"stage": 0}
    _default(zero, "contiguous_gradients", True, notes, "no fragmentation while gradients are collected")
    _default(
        zero, "overlap_comm", run.world_size > 1 and run.device == "cuda", notes, "reduction beside the backward pass"
    )
    _default(zero, "reduce_bucket_size", BUCKET_NUMEL, notes, "100 MB of GPU memory in 16 bit")
    if placement.stage < 3:
        _default(zero, "allgather_bucket_size", BUCKET_NUMEL, notes, "100 MB of GPU memory in 16 bit")
        for key in STAGE3_ONLY:
            zero.pop(key, None)
    blocks = [("offload_optimizer", placement.optimizer)]
    if placement.stage == 3:
        _stage3(zero, placement, aio, model, run, settings.precision, notes)
        blocks.insert(0, ("offload_param", placement.params))
    for name, device in blocks:
        if device != "none" and staged:
            zero[name] = staged_block(name, placement, settings, notes)
        elif device != "none":
            user = _user_block(settings, name)
            zero[name] = {"device": device, "pin_memory": _pin(user, settings, name, notes)}
            if (ratio := user.get("ratio", 1.0)) != 1.0 and placement.stage == 3:
                zero[name]["ratio"] = ratio
            elif ratio != 1.0:
                notes.changed(f"{name}.ratio", ratio, 1.0, "partial offload needs ZeRO-3")
    return zero


def _stage3(
    zero: dict[str, Any], placement: OffloadPlacement, aio: Mapping[str, Any], model: WeightCounts, run: RunFacts,
    precision: Precision, notes: Notes,
) -> None:  # fmt: skip
    _default(zero, "sub_group_size", SUB_GROUP_NUMEL, notes, "400 MB per optimizer state and tile")
    if zero["sub_group_size"] == 0:
        notes.changed("zero_optimization.sub_group_size", 0, 1, "a tile holds at least one weight")
        zero["sub_group_size"] = 1
    _default(zero, "stage3_max_live_parameters", LIVE_NUMEL, notes, "1 GB of GPU memory in 16 bit")
    _default(zero, "stage3_max_reuse_distance", LIVE_NUMEL, notes, "1 GB of GPU memory in 16 bit")
    persistence = min(PERSISTENCE_NUMEL, 10 * model.hidden_size) if model.hidden_size else PERSISTENCE_NUMEL
    if placement.params == "nvme":
        _default(
            zero, "stage3_prefetch_bucket_size", BUCKET_NUMEL, notes, "on: reads the next weight ahead from the drive"
        )
        if zero.get("stage3_allgather_sequential"):
            notes.dropped("stage3_allgather_sequential", "not with parameters on NVMe")
            del zero["stage3_allgather_sequential"]
        cap = persistence_cap_numel(precision, run.world_size, int(aio["block_size"]))
        _default(
            zero, "stage3_param_persistence_threshold", min(persistence, cap), notes, "norms and biases stay on the GPU"
        )
        if zero["stage3_param_persistence_threshold"] > cap:
            old = zero["stage3_param_persistence_threshold"]
            notes.changed(
                "stage3_param_persistence_threshold", old, cap, "larger ones live on NVMe and would be read all at once"
            )
            zero["stage3_param_persistence_threshold"] = cap
    else:
        _default(zero, "stage3_prefetch_bucket_size", BUCKET_NUMEL, notes, "100 MB of weights fetched ahead")
        _default(zero, "stage3_param_persistence_threshold", persistence, notes, "norms and biases stay on the GPU")
    _default(zero, "stage3_gather_16bit_weights_on_model_save", False, notes, "export writes shard by shard instead")


def staged_block(name: str, placement: OffloadPlacement, settings: RunSettings, notes: Notes) -> dict[str, Any]:
    """offload_param or offload_optimizer as the staged engine needs it: where, and how much may stay in RAM.

    offload_optimizer's pin_memory says whether outcore pins the homes of parameters and gradients.
    """
    user = _user_block(settings, name)
    device = placement.params if name == "offload_param" else placement.optimizer
    block: dict[str, Any] = {"device": device, "pin_memory": _pin(user, settings, name, notes)}
    if device == "nvme":
        block["nvme_path"] = placement.nvme_path
    if name == "offload_param":  # DeepSpeed would pin every share while loading, rounded up, and never give it back
        block["pin_memory"] = False
    unused = sorted(set(user) & {"buffer_count", "buffer_size", "pipeline_read", "pipeline_write", "fast_init"})
    if unused:
        notes.lines.append(f"{name}.{', '.join(unused)}: not used, outcore sizes its staging memory itself")
    if name == "offload_param" and device == "nvme":
        block["max_in_cpu"] = settings.offload.max_in_cpu_numel
    return block


def _user_block(settings: RunSettings, name: str) -> dict[str, Any]:
    """A copy of a block of the file's zero_optimization."""
    return dict(settings.file.get(f"zero_optimization.{name}", {}))


def _pin(user: Mapping[str, Any], settings: RunSettings, name: str, notes: Notes) -> bool:
    """The flag, else the block's own, else true."""
    in_file = user.get("pin_memory", settings.offload.pin_memory)
    if not settings.offload.pin_is_asked:
        return bool(in_file)
    if in_file != settings.offload.pin_memory:
        notes.lines.append(f"{name}.pin_memory = {settings.offload.pin_memory}: --pin_memory wins over {in_file}")
    return settings.offload.pin_memory


def _default(zero: dict[str, Any], key: str, value: Any, notes: Notes, reason: str) -> None:
    if zero.get(key) is None:
        zero[key] = value
        notes.chose(f"zero_optimization.{key}", value, reason)


def _check_numbers(zero: dict[str, Any]) -> None:
    """Element counts may be written 5e8; whole numbers of 0 or more come out."""
    for key, value in zero.items():
        if key.endswith(("_size", "_threshold", "_parameters", "_distance")):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
                raise ValueError(
                    f"deepspeed_config.json: zero_optimization.{key} must be a whole number of elements, got {value!r}."
                )
            zero[key] = int(value)
    if zero.get("reduce_bucket_size") == 0:
        raise ValueError("deepspeed_config.json: zero_optimization.reduce_bucket_size must be above 0.")


def _refuse(
    zero: dict[str, Any], user_zero: Mapping[str, Any], placement: OffloadPlacement, run: RunFacts, notes: Notes
) -> None:
    """Features that crash or are untested together with what was chosen."""
    where = "deepspeed_config.json: zero_optimization."
    if zero.get("zenflow"):
        raise ValueError(f"{where}zenflow is not supported here. Delete the block.")
    if (user_zero.get("offload_optimizer") or {}).get("super_offload"):
        raise ValueError(
            f"{where}offload_optimizer.super_offload is for Grace-Hopper machines and not supported here. Delete it."
        )
    if zero.get("legacy_stage1"):
        raise ValueError(f"{where}legacy_stage1 was removed from DeepSpeed. Delete it.")
    if zero.get("compute_grad_norm") is False:
        notes.dropped("zero_optimization.compute_grad_norm false", "clipping and the metrics need the gradient norm")
    zero.pop("compute_grad_norm", None)
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if zero.get(key) and run.device == "cpu":
            raise ValueError(f"{where}{key} works on GPUs only. Set it to false.")
    hpz = zero.get("zero_hpz_partition_size", 1)
    if hpz > 1 and run.world_size % hpz:
        raise ValueError(
            f"{where}zero_hpz_partition_size {hpz} must divide the {run.world_size} rank(s) of the run. Set it to 1."
        )
    if placement.params == "nvme" and zero.get("stage3_module_granularity_threshold"):
        notes.changed(
            "zero_optimization.stage3_module_granularity_threshold", zero["stage3_module_granularity_threshold"], 0,
            "it reads whole groups of modules at once",
        )  # fmt: skip
        zero["stage3_module_granularity_threshold"] = 0
