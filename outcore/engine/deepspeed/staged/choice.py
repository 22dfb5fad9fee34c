"""Whether outcore's staged offload can run a configuration, in which format it keeps states, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outcore.engine.deepspeed.notes import Notes
from outcore.engine.deepspeed.offload import OffloadCosts
from outcore.optim import state_format
from outcore.sizing.deepspeed import ELEMENT_BYTES, Precision
from outcore.sizing.staged import RAM_OVERHEAD_BYTES

_SAMPLE_NUMEL = 1 << 22


def can_stage(user: Mapping[str, Any], zero: Mapping[str, Any], notes: Notes) -> bool:
    """False, with a note naming the key, where only DeepSpeed's own offload does what the configuration asks for."""
    why = _only_stock(user, zero)
    if why is not None:
        notes.warn(f"outcore.offload = stock: {why}. Remove it to have states moved by outcore instead of DeepSpeed.")
    return why is None


def _only_stock(user: Mapping[str, Any], zero: Mapping[str, Any]) -> str | None:
    optimizer = user.get("optimizer") or {}
    params = optimizer.get("params") or {}
    if str(optimizer.get("type", "AdamW")).lower() == "adam" and params.get("adam_w_mode") is False:
        return "optimizer.params.adam_w_mode false (Adam with L2 regularisation) is DeepSpeed's only"
    for block, key in (
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
        ("fp16", "fp16_master_weights_and_grads"),
    ):
        if (user.get(block) or {}).get(key):
            return f"{block}.{key} is DeepSpeed's only (outcore.state_format split8 is smaller)"
    if params.get("fp32_optimizer_states") is False:
        return (
            "optimizer.params.fp32_optimizer_states false is DeepSpeed's only (outcore.state_format split8 is smaller)"
        )
    if (zero.get("offload_optimizer") or {}).get("ratio", 1.0) != 1.0:
        return "zero_optimization.offload_optimizer.ratio (part of the optimizer on the GPU) is DeepSpeed's only"
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if zero.get(key):
            return f"zero_optimization.{key} is DeepSpeed's only"
    if zero.get("zero_hpz_partition_size", 1) > 1:
        return "zero_optimization.zero_hpz_partition_size is DeepSpeed's only"
    return None


def choose_states(outcore: Mapping[str, Any], precision: Precision) -> str:
    """What outcore.state_format names; auto: the smallest exact one. ValueError where precision forbids it."""
    name = outcore.get("state_format", "auto")
    if name == "auto":
        return "split" if precision == "bf16" else "fp32"
    if state_format(name).split_master and precision != "bf16":
        raise ValueError(
            f"deepspeed_config.json: outcore.state_format {name} splits the fp32 master into a bf16 parameter and a "
            f"residual, so it needs bf16; this run is {precision}. Use fp32 or fp32_m8, or auto."
        )
    return name


def staged_costs(states: str, precision: Precision, gradients_on_nvme: bool = False) -> OffloadCosts:
    """Bytes per parameter: 16-bit parameter and gradient, and the states of the format. Gradients go to the drive only
    beside states."""
    state_bytes = state_format(states).chunk_bytes(_SAMPLE_NUMEL) / _SAMPLE_NUMEL
    one = float(ELEMENT_BYTES[precision])
    on_drive = one if gradients_on_nvme else 0.0
    return OffloadCosts(
        2 * one + state_bytes, RAM_OVERHEAD_BYTES, 2 * one - on_drive, state_bytes + on_drive, is_partial=True
    )
