"""Precision, optimizer and drive transfers of the configuration that DeepSpeed is given.

DeepSpeed's own traps here: "Adam" means AdamW unless adam_w_mode says otherwise; AdamW without offload wants a compiled
extension unless torch_adam is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outcore.config import RunSettings
from outcore.engine.deepspeed.notes import Notes
from outcore.engine.deepspeed.offload import OffloadPlacement
from outcore.engine.deepspeed.settings import RunFacts


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
