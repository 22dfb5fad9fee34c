"""Whether outcore's staged offload can run what was asked for, and what it costs."""

from __future__ import annotations

from outcore.config import RunSettings
from outcore.engine.deepspeed.offload import OffloadCosts
from outcore.engine.deepspeed.settings import Notes
from outcore.optim import state_format
from outcore.sizing.staged import RAM_OVERHEAD_BYTES

_SAMPLE_NUMEL = 1 << 22


def can_stage(settings: RunSettings, notes: Notes) -> bool:
    """False, with a note naming the key, where only DeepSpeed's own offload does what the file asks for."""
    why = _only_stock(settings)
    if why is not None:
        notes.warn(f"outcore.offload = stock: {why}. Remove it to have states moved by outcore instead of DeepSpeed.")
    return why is None


def _only_stock(settings: RunSettings) -> str | None:
    file = settings.file
    if str(file.get("optimizer.type", "AdamW")).lower() == "adam" and file.get("optimizer.params.adam_w_mode") is False:
        return "optimizer.params.adam_w_mode false (Adam with L2 regularisation) is DeepSpeed's only"
    for key in (
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
        "fp16.fp16_master_weights_and_grads",
    ):
        if file.get(key):
            return f"{key} is DeepSpeed's only (outcore.state_format split8 is smaller)"
    if file.get("optimizer.params.fp32_optimizer_states") is False:
        return (
            "optimizer.params.fp32_optimizer_states false is DeepSpeed's only (outcore.state_format split8 is smaller)"
        )
    zero = "zero_optimization"
    if file.get(f"{zero}.offload_optimizer.ratio", 1.0) != 1.0:
        return f"{zero}.offload_optimizer.ratio (part of the optimizer on the GPU) is DeepSpeed's only"
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if file.get(f"{zero}.{key}"):
            return f"{zero}.{key} is DeepSpeed's only"
    if file.get(f"{zero}.zero_hpz_partition_size", 1) > 1:
        return f"{zero}.zero_hpz_partition_size is DeepSpeed's only"
    return None


def staged_costs(states: str, settings: RunSettings, gradients_on_nvme: bool = False) -> OffloadCosts:
    """Bytes per parameter: 16-bit parameter and gradient, and the states of the format. Gradients go to the drive only
    beside states."""
    state_bytes = state_format(states).chunk_bytes(_SAMPLE_NUMEL) / _SAMPLE_NUMEL
    one = float(settings.element_bytes)
    on_drive = one if gradients_on_nvme else 0.0
    return OffloadCosts(
        2 * one + state_bytes, RAM_OVERHEAD_BYTES, 2 * one - on_drive, state_bytes + on_drive, is_partial=True
    )
