"""Batch sizes, precision, optimizer and schedule of the resolved configuration.

DeepSpeed's own traps here: train_batch_size must equal micro-batch x accumulation x ranks exactly; "Adam" means AdamW
unless adam_w_mode says otherwise; AdamW without offload wants a compiled extension unless torch_adam is set; warm-up
must be at least one step (and is taken as at least two).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outcore.engine.deepspeed.config import keys
from outcore.engine.deepspeed.notes import Notes
from outcore.engine.deepspeed.offload import Placement
from outcore.engine.deepspeed.settings import RunFacts
from outcore.sizing.deepspeed import Precision

DEFAULT_MICRO_BATCH = 2
DEFAULT_ACCUMULATION = 4
DEFAULT_LR = 3e-4


def batch_section(user: Mapping[str, Any], run: RunFacts, notes: Notes) -> dict[str, int]:
    """The three batch numbers, with train_batch_size = micro-batch x accumulation x ranks."""
    total = _positive(user, "train_batch_size")
    micro = _prefer("train_micro_batch_size_per_gpu", run.micro_batch_size, user, "micro_batch_size", notes)
    accumulation = _prefer(
        "gradient_accumulation_steps", run.gradient_accumulation_steps, user, "gradient_accumulation_steps", notes
    )
    flags_given = run.micro_batch_size is not None or run.gradient_accumulation_steps is not None
    if total is not None and (micro is None or accumulation is None):
        known = micro or accumulation or DEFAULT_MICRO_BATCH
        if total % (known * run.world_size):
            raise ValueError(
                f"deepspeed_config.json: train_batch_size {total} cannot be split into whole micro-batches: it must "
                "be a "
                f"multiple of {known} x {run.world_size} rank(s). Set train_micro_batch_size_per_gpu and "
                "gradient_accumulation_steps instead."
            )
        rest = total // (known * run.world_size)
        if accumulation is None:
            micro, accumulation = known, rest
            notes.chose("gradient_accumulation_steps", rest, f"train_batch_size {total} / ({known} x {run.world_size})")
        else:
            micro = rest
            notes.chose(
                "train_micro_batch_size_per_gpu", rest, f"train_batch_size {total} / ({known} x {run.world_size})"
            )
    if micro is None:
        micro = DEFAULT_MICRO_BATCH
        notes.chose("train_micro_batch_size_per_gpu", micro, "small enough for 8 GB GPUs")
    if accumulation is None:
        accumulation = DEFAULT_ACCUMULATION
        notes.chose("gradient_accumulation_steps", accumulation, "pays the optimizer step once per 4 micro-batches")
    product = micro * accumulation * run.world_size
    if total is not None and total != product:
        if not flags_given:
            raise ValueError(
                f"deepspeed_config.json: train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {accumulation} x {run.world_size} rank(s) = {product}. Remove one of "
                "the three."
            )
        notes.changed("train_batch_size", total, product, f"{micro} x {accumulation} x {run.world_size} rank(s)")
    return {
        "train_batch_size": product,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }


def precision_section(user: Mapping[str, Any], run: RunFacts, notes: Notes) -> tuple[Precision, dict[str, Any]]:
    """The precision and its blocks; exactly one of bf16 and fp16 is enabled, or neither for fp32."""
    if "bf16" in user and "bfloat16" in user:
        raise ValueError("deepspeed_config.json: bf16 and bfloat16 are the same block; keep bf16.")
    bf16 = keys.check_block("bf16", user.get("bf16", user.get("bfloat16")), keys.BF16)
    fp16 = keys.check_block("fp16", user.get("fp16"), keys.FP16)
    for name, block in (("bf16", bf16), ("fp16", fp16)):
        if not isinstance(block.get("enabled", False), bool):
            raise ValueError(f"deepspeed_config.json: {name}.enabled must be true or false, got {block['enabled']!r}.")
    in_file: Precision | None = None
    if bf16.get("enabled") and fp16.get("enabled"):
        raise ValueError(
            "deepspeed_config.json: bf16.enabled and fp16.enabled contradict each other; enable one of them."
        )
    if bf16.get("enabled"):
        in_file = "bf16"
    elif fp16.get("enabled"):
        in_file = "fp16"
    elif bf16.get("enabled") is False or fp16.get("enabled") is False:
        in_file = "fp32"
    precision = run.precision or in_file
    if precision is None:
        precision = "bf16"
        notes.chose("bf16.enabled", True, "same range as fp32, no loss scaling")
    elif in_file is not None and precision != in_file:
        notes.lines.append(f"precision {precision} wins over the file's {in_file}")
    if precision == "fp16" and run.device == "cpu" and not _cpu_has_fp16():
        raise ValueError(
            "fp16 needs a GPU: this CPU has no fp16 arithmetic. Use --precision bf16 or fp32 (fp16.enabled false in "
            "deepspeed_config.json)."
        )
    if precision == "bf16":
        return precision, {"bf16": {**bf16, "enabled": True}}
    if precision == "fp16":
        defaults = {
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        }
        return precision, {"fp16": {**defaults, **fp16, "enabled": True}}
    return precision, {"bf16": {"enabled": False}, "fp16": {"enabled": False}}


def optimizer_section(
    user: Mapping[str, Any], placement: Placement, run: RunFacts, precision: Precision, notes: Notes
) -> dict[str, Any]:
    """AdamW: torch's own where states stay on the GPU, DeepSpeed's CPU AdamW where they are offloaded."""
    block = keys.check_block("optimizer", user.get("optimizer"), frozenset({"type", "params", "legacy_fusion"}))
    kind = block.get("type", "AdamW")
    if not isinstance(kind, str) or kind.lower() not in ("adam", "adamw"):
        raise ValueError(
            f"deepspeed_config.json: optimizer.type {kind!r} is not supported; outcore trains with AdamW (or Adam)."
        )
    params = block.get("params") or {}
    if "max_grad_norm" in params:
        raise ValueError(
            "deepspeed_config.json: optimizer.params.max_grad_norm is refused by DeepSpeed; write gradient_clipping "
            "at the "
            "top level instead."
        )
    params = keys.check_block("optimizer.params", params, keys.ADAM)
    adam_w = params.get("adam_w_mode", True)
    if kind.lower() == "adamw" and adam_w is False:
        raise ValueError("deepspeed_config.json: optimizer.type AdamW contradicts adam_w_mode false; use type Adam.")
    if params.pop("amsgrad", False):
        raise ValueError(
            "deepspeed_config.json: optimizer.params.amsgrad is not supported by DeepSpeed's Adam; remove it."
        )
    betas = params.get("betas", [0.9, 0.999])
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        raise ValueError(f"deepspeed_config.json: optimizer.params.betas must be two numbers, got {betas!r}.")
    resolved: dict[str, Any] = {
        "lr": _real("learning_rate (optimizer.params.lr)", run.learning_rate, params.get("lr"), DEFAULT_LR, notes),
        "betas": [
            _real("adam_beta1 (optimizer.params.betas[0])", run.adam_beta1, betas[0], 0.9, notes, below=1.0),
            _real("adam_beta2 (optimizer.params.betas[1])", run.adam_beta2, betas[1], 0.999, notes, below=1.0),
        ],
        "eps": _real("adam_epsilon (optimizer.params.eps)", run.adam_epsilon, params.get("eps"), 1e-8, notes),
        "weight_decay": _real(
            "weight_decay (optimizer.params.weight_decay)", run.weight_decay, params.get("weight_decay"), 0.01, notes
        ),
    }
    if kind.lower() == "adam":
        resolved["adam_w_mode"] = bool(adam_w)
    if placement.optimizer == "none":
        resolved.update(_torch_adam(params, run, notes))
    else:
        if params.get("torch_adam"):
            notes.changed(
                "optimizer.params.torch_adam", True, False, "offloaded states are updated by DeepSpeed's CPU AdamW"
            )
        if precision == "fp32" or "fp32_optimizer_states" not in params:
            params.pop("fp32_optimizer_states", None)
        else:
            resolved["fp32_optimizer_states"] = params["fp32_optimizer_states"]
        if "bias_correction" in params:
            resolved["bias_correction"] = params["bias_correction"]
    return {"optimizer": {"type": "AdamW" if kind.lower() == "adamw" else "Adam", "params": resolved}}


def _cpu_has_fp16() -> bool:
    """As DeepSpeed's CPU accelerator asks."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return False


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


def _prefer(key: str, flag: int | None, user: Mapping[str, Any], flag_name: str, notes: Notes) -> int | None:
    in_file = _positive(user, key)
    if flag is None:
        return in_file
    if in_file is not None and in_file != flag:
        notes.lines.append(f"{key} = {flag}: {flag_name} wins over the file's {in_file}")
    return flag


def _positive(block: Mapping[str, Any], key: str, prefix: str = "", least: int = 1) -> int | None:
    value = block.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"deepspeed_config.json: {prefix}{key} must be a whole number of {least} or more, got {value!r}."
        )
    return value


def _real(
    name: str, flag: float | None, in_file: Any, default: float, notes: Notes, below: float = float("inf")
) -> float:
    value = flag if flag is not None else in_file
    if value is None:
        notes.chose(name, default, "default")
        value = default
    elif flag is not None and in_file is not None and in_file != flag and in_file != default:
        notes.lines.append(f"{name} = {flag}: wins over the file's {in_file}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < below:
        limit = f"below {below}" if below != float("inf") else "or more"
        raise ValueError(f"{name} must be a number of 0 {limit}, got {value!r}.")
    return float(value)
