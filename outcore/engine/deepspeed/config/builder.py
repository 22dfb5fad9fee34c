"""The resolved DeepSpeed configuration: nothing left at "auto", no value that DeepSpeed 0.19.8 crashes on.

    built = build_config(user_config, settings, model, run)
    built.config    dict for deepspeed.initialize / HfDeepSpeedConfig (with the resolved "outcore" block, which
    DeepSpeed ignores) built.notes     a line per default (with its reason), per changed user value, per fallback
    built.warnings  those notes that must be shown loudly
    built.offload   where things really live: stage, optimizer, params ("none"|"cpu"|"nvme"), nvme_path, locked_bytes

`user_config` is the parsed deepspeed_config.json ({} without one) and is never changed; `settings` are the offload
flags, `model` and `run` the facts of the run (settings.py). Values of the file win over our defaults, except where
DeepSpeed would crash or corrupt data: those are raised, with a note. Flags win over the file. Contradictions and
misspelled keys are a ValueError that names the key.

The NVMe folder is created, written to and read back (`nvme_check`), nothing else has side effects. With several ranks
on a host, let one rank build and broadcast the result, so that all ranks take the same fallback.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from outcore.engine.deepspeed.config import keys
from outcore.engine.deepspeed.config.aio_section import aio_section
from outcore.engine.deepspeed.config.run_section import (
    batch_section,
    optimizer_section,
    precision_section,
)
from outcore.engine.deepspeed.config.zero_section import check_locked_bytes, zero_section
from outcore.engine.deepspeed.notes import Notes
from outcore.engine.deepspeed.offload import (
    STOCK_COSTS,
    NvmeCheck,
    Placement,
    fall_back,
    place,
    usable_for_deepspeed,
    wants_gradients_on_nvme,
)
from outcore.engine.deepspeed.settings import BuiltConfig, ChosenOffload, DeepSpeedSettings, RunFacts
from outcore.engine.deepspeed.staged.choice import can_stage, choose_states, staged_costs
from outcore.engine.deepspeed.staged.plan import drive_bytes
from outcore.optim import FORMATS, check_eps, state_format
from outcore.sizing.swapping import WeightCounts

__all__ = ["BuiltConfig", "ChosenOffload", "DeepSpeedSettings", "RunFacts", "WeightCounts", "build_config"]

OUTCORE_DEFAULTS: dict[str, Any] = {
    "staging_bytes": 8 << 30,
    "write_combined": "auto",
    "streams": 4,
    "engine": "auto",
    "nvme_path": "",
    "residency": "auto",
    "offload": "staged",
    "state_format": "auto",
    "ram_budget_gib": None,
    "nvme_offload_gradients": False,
}
"""The "outcore" block: ours, ignored by DeepSpeed. "auto" in it is resolved by whoever uses the value."""
RESOLVED_ELSEWHERE = frozenset({"optimizer", "scheduler", "bf16", "bfloat16", "fp16", "zero_optimization", "aio"})
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
STEPS_PER_PRINT = 10**9
"""DeepSpeed's own progress lines are off: the training loop prints better ones."""


def build_config(
    user_config: Mapping[str, Any],
    settings: DeepSpeedSettings,
    model: WeightCounts,
    run: RunFacts,
    *,
    nvme_check: NvmeCheck = usable_for_deepspeed,
    staged: bool = False,
) -> BuiltConfig:
    """Resolve `user_config` for this model and run; see the module docstring.

    `staged`: offloaded states and parameters will be moved by outcore (`staged/`), not by DeepSpeed: none of its swap
    buffers are sized, and where the configuration asks for something that only DeepSpeed's own offload does, a note
    says so and `offload.staged` is False. The default makes a configuration that stock DeepSpeed can run.

    Raises:
        ValueError: unknown or contradictory keys, values out of range, an unusable NVMe path under `strict_offload`.
    """
    if not isinstance(user_config, Mapping):
        raise ValueError(f"deepspeed_config.json must hold a JSON object {{...}}, got {type(user_config).__name__}.")
    keys.check_top_level(user_config)
    notes = Notes()
    user: dict[str, Any] = _without_auto(copy.deepcopy(dict(user_config)))
    if "bfloat16" in user and "bf16" not in user:
        user["bf16"] = user.pop("bfloat16")
    outcore = {**OUTCORE_DEFAULTS, **keys.check_block("outcore", user.pop("outcore", {}), keys.OUTCORE)}
    _check_outcore(outcore)
    zero = zero_block_of(user)

    config: dict[str, Any] = {}
    config.update(batch_section(user, run, notes))
    precision, precision_blocks = precision_section(user, run, notes)
    config.update(precision_blocks)
    if staged:
        staged = can_stage(user, zero, notes)
    states = choose_states(outcore, precision) if staged else "fp32"
    outcore["nvme_offload_gradients"] = wants_gradients_on_nvme(outcore, settings, notes)
    costs = staged_costs(states, precision, outcore["nvme_offload_gradients"]) if staged else STOCK_COSTS

    def budgeted_drive_bytes(chosen: Placement) -> int:
        swaps = aio_section(user, settings, Notes())
        block, _ = zero_section(
            zero, chosen, swaps, settings, model, run, precision, outcore["staging_bytes"], Notes(), staged=True
        )
        blocks = {**precision_blocks, "data_types": user.get("data_types")}
        blocks |= {"outcore": outcore, "zero_optimization": block}
        return drive_bytes(blocks, _chosen(chosen, 0, states, staged=True), model, run)

    placement = place(
        zero, outcore, settings, model, run, precision, notes, nvme_check, costs,
        budgeted_drive_bytes if staged else None,
    )  # fmt: skip
    staged = staged and placement.stage == 3 and placement.optimizer in ("cpu", "nvme")
    aio = aio_section(user, settings, notes)
    zero_block, locked_bytes = zero_section(
        zero, placement, aio, settings, model, run, precision, outcore["staging_bytes"], notes, staged=staged
    )
    if placement.nvme_path is not None:
        problem = check_locked_bytes(locked_bytes, run)
        if problem:
            placement = fall_back(placement, problem, settings, notes)
            zero_block, locked_bytes = zero_section(
                zero, placement, aio, settings, model, run, precision, outcore["staging_bytes"], notes
            )
    config["zero_optimization"] = zero_block
    if placement.nvme_path is not None:
        config["aio"] = aio
    config.update(optimizer_section(user, placement, run, precision, notes))
    if keys.check_block("scheduler", user.get("scheduler"), frozenset({"type", "params"})):
        notes.lines.append("scheduler left out: the training loop sets the learning rate itself")
    config["gradient_clipping"] = _clipping(user, run, notes)
    _check_combinations(user, placement, precision)
    for key, value in user.items():
        if key not in RESOLVED_ELSEWHERE and key not in BATCH_KEYS and key in keys.TOP_LEVEL:
            config.setdefault(key, value)
    config.setdefault("steps_per_print", STEPS_PER_PRINT)
    config.setdefault("wall_clock_breakdown", False)
    outcore["nvme_offload_gradients"] = staged and placement.gradients_on_nvme
    config["outcore"] = outcore
    if staged:
        check_eps(config["optimizer"]["params"]["eps"], state_format(states).moments8)
        config["zero_force_ds_cpu_optimizer"] = False  # the parameter groups come from outside, the step is ours
    offload = _chosen(placement, locked_bytes, states, staged=staged)
    return BuiltConfig(config, tuple(notes.lines), offload, tuple(notes.warnings))


def _chosen(placement: Placement, locked_bytes: int, states: str, *, staged: bool) -> ChosenOffload:
    return ChosenOffload(
        placement.stage, placement.optimizer, placement.params, placement.nvme_path, locked_bytes,
        staged, states, placement.ram_budget_bytes, staged and placement.gradients_on_nvme,
    )  # fmt: skip


def _without_auto(block: dict[str, Any]) -> dict[str, Any]:
    """Without the entries whose value is "auto" (Hugging Face's placeholder); the outcore block keeps its own."""
    return {
        key: _without_auto(value) if isinstance(value, dict) and key != "outcore" else value
        for key, value in block.items()
        if not (isinstance(value, str) and value == "auto")
    }


def zero_block_of(user: Mapping[str, Any]) -> dict[str, Any]:
    """The user's zero_optimization block, checked, without "auto", in DeepSpeed's current spelling."""
    block = user.get("zero_optimization", {})
    if isinstance(block, Mapping):
        block = _without_auto(dict(block))
    if isinstance(block, bool):
        block = {"stage": int(block)}
    if isinstance(block, Mapping):
        for key, feature in keys.REMOVED_ZERO.items():
            if key in block:
                raise ValueError(
                    f"deepspeed_config.json: zero_optimization.{key} was removed from DeepSpeed ({feature}). Delete it."
                )
    zero = keys.check_block("zero_optimization", block, keys.ZERO)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.pop(old, None) and new not in zero:
            zero[new] = {"device": "cpu"}
    zero.pop("cpu_offload_use_pin_memory", None)
    for short in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance", "param_persistence_threshold",
                  "model_persistence_threshold", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
                  "use_all_reduce_for_fetch_params", "allgather_sequential"):  # fmt: skip
        if short in zero:
            zero.setdefault(f"stage3_{short}", zero[short])
            del zero[short]
    if "stage3_gather_fp16_weights_on_model_save" in zero:
        old = zero.pop("stage3_gather_fp16_weights_on_model_save")
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", old)
    for key, known in (("offload_param", keys.OFFLOAD_PARAM), ("offload_optimizer", keys.OFFLOAD_OPTIMIZER)):
        if key in zero:
            zero[key] = keys.check_block(f"zero_optimization.{key}", zero[key], known)
    return zero


def _check_outcore(outcore: Mapping[str, Any]) -> None:
    for key, allowed in (
        ("write_combined", ("auto", "on", "off", True, False)),
        ("engine", ("auto", "stream", "deepspeed")),
        ("residency", ("auto", "ram", "nvme")),
        ("offload", ("staged", "stock")),
        ("state_format", ("auto", *(known.name for known in FORMATS))),
    ):
        if outcore[key] not in allowed:
            raise ValueError(f"deepspeed_config.json: outcore.{key} must be one of {allowed}, got {outcore[key]!r}.")
    for key in ("staging_bytes", "streams"):
        value = outcore[key]
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"deepspeed_config.json: outcore.{key} must be a whole number above 0, got {value!r}.")
    if not isinstance(outcore["nvme_offload_gradients"], bool):
        raise ValueError(
            "deepspeed_config.json: outcore.nvme_offload_gradients must be true or false, "
            f"got {outcore['nvme_offload_gradients']!r}."
        )
    budget = outcore["ram_budget_gib"]
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or budget < 0):
        raise ValueError(f"deepspeed_config.json: outcore.ram_budget_gib must be 0 or more GiB, got {budget!r}.")
    lanes = keys.check_block("outcore.lanes", outcore.get("lanes"), frozenset({"slot_bytes", "num_slots"}))
    for key, value in lanes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(
                f"deepspeed_config.json: outcore.lanes.{key} must be a whole number above 0, got {value!r}."
            )
    if outcore["nvme_path"] is not None and not isinstance(outcore["nvme_path"], str):
        raise ValueError(f"deepspeed_config.json: outcore.nvme_path must be a text, got {outcore['nvme_path']!r}.")


def _clipping(user: Mapping[str, Any], run: RunFacts, notes: Notes) -> float:
    value = run.max_grad_norm
    if value is None:
        value = user.get("gradient_clipping")
        if value is None:
            value = 1.0
            notes.chose("gradient_clipping", value, "global norm; the usual choice for language models")
    elif "gradient_clipping" in user and user["gradient_clipping"] != value:
        notes.lines.append(
            f"gradient_clipping = {value}: max_grad_norm wins over the file's {user['gradient_clipping']}"
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ValueError(f"gradient_clipping (max_grad_norm) must be 0 (off) or a positive number, got {value!r}.")
    return float(value)


def _check_combinations(user: Mapping[str, Any], placement: Placement, precision: str) -> None:
    """Keys outside zero_optimization on which DeepSpeed fails for this stage, precision or offload."""
    where = "deepspeed_config.json: "
    types = keys.check_block("data_types", user.get("data_types"), keys.DATA_TYPES)
    grads, params = types.get("grad_accum_dtype"), types.get("param_dtype")
    if grads is not None and grads not in ("fp32", "fp16", "bf16"):
        raise ValueError(f"{where}data_types.grad_accum_dtype must be fp32, fp16 or bf16, got {grads!r}.")
    if placement.stage == 0 and grads not in (None, precision):
        raise ValueError(
            f"{where}data_types.grad_accum_dtype {grads} needs zero_stage zero1 or higher; with zero_stage none "
            "DeepSpeed "
            f"accumulates gradients in {precision} only. Remove it or choose another stage."
        )
    if params not in (None, precision):
        raise ValueError(f"{where}data_types.param_dtype {params} contradicts the precision {precision}. Remove it.")
    for block, key in (("torch_autocast", "enabled"), ("compile", "deepcompile")):
        value = user.get(block)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{where}{block!r} must be a JSON object {{...}}, got {value!r}.")
        if value and value.get(key):
            raise ValueError(f"{where}{block}.{key} is not supported here. Set it to false, or delete the block.")
    sixteen_bit = user.get(precision) or {}
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads"):
        if sixteen_bit.get(key) and (placement.stage < 3 or placement.optimizer != "cpu"):
            raise ValueError(
                f"{where}{precision}.{key} needs ZeRO-3 with optimizer states in RAM; here they are on "
                f"{placement.optimizer.replace('none', 'the GPU')} with stage {placement.stage}. Set it to false."
            )
    if placement.stage == 3 and (user.get("prescale_gradients") or user.get("gradient_predivide_factor", 1.0) != 1.0):
        raise ValueError(
            f"{where}prescale_gradients and gradient_predivide_factor do not work with ZeRO-3. Remove them."
        )
    if user.get("gradient_allreduce_op", "mean") != "mean":
        raise ValueError(
            f"{where}gradient_allreduce_op must be mean: outcore averages the loss over all tokens itself."
        )
    if user.get("managed_gradient_accumulation", True) is not True:
        raise ValueError(f"{where}managed_gradient_accumulation false is not supported here. Delete it.")
    if user.get("sequence_parallel_size", 1) != 1:
        raise ValueError(f"{where}sequence_parallel_size must be 1: outcore's DeepSpeed engine is data parallel.")
    if user.get("communication_data_type", "fp32") not in ("fp32", "fp16", "bf16"):
        raise ValueError(
            f"{where}communication_data_type must be fp32, fp16 or bf16, got {user['communication_data_type']!r}."
        )
