"""When a tier is full: say which, by how much, and the one setting to change."""

from __future__ import annotations

import errno
import re

import torch

from outcore.units import format_gib


class TierFull(RuntimeError):
    """VRAM, RAM or the drive is full; the message has the tier, the shortfall and the setting to change."""


def vram_advice(config: object, message: str, micro_batch: int) -> str:
    """Words for a CUDA out-of-memory error: what was asked for, what is there, the one setting to change."""
    asked = re.search(r"Tried to allocate ([\d.]+ [KMG]iB)", message)
    free = re.search(r"of which ([\d.]+ [KMG]iB) is free", message)
    limit = ""
    if torch.cuda.is_available():
        total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        limit = f" of {format_gib(total_bytes)}"
    text = f"GPU memory{limit} is full"
    if asked:
        text += f": {asked.group(1)} more was needed" + (f", {free.group(1)} was free" if free else "")
    return text + f". {_vram_setting(config, micro_batch)}"


def _vram_setting(config: object, micro_batch: int) -> str:
    stage = getattr(config, "zero_stage", None)
    if micro_batch > 1:
        return (
            f"Use --per_device_train_batch_size {micro_batch // 2} (and twice the gradient_accumulation_steps: "
            "the result is the same)."
        )
    if getattr(config, "activation_checkpointing", True) is False:
        return "Use --activation_checkpointing true."
    if stage in ("none", "zero1", "zero2"):
        return "Use --zero_stage zero3, which keeps parameters in RAM."
    seq_length = getattr(config, "seq_length", None)
    shorter = f" {seq_length // 2}" if seq_length else " (half of the present one)"
    return f"Use --seq_length{shorter}."


def ram_advice(config: object) -> str:
    """The one setting to change when RAM is full."""
    if getattr(config, "zero_stage", None) != "infinity":
        return "Use --zero_stage infinity --nvme_offload_path DIR, which keeps optimizer states on an NVMe drive."
    return "Use --lora_r 16 (adapters need no optimizer states for the base), or a smaller model."


def explain(error: BaseException, config: object, micro_batch: int) -> TierFull | None:
    """A TierFull for an error that means 'out of room', None for any other error."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "CUDA out of memory" in text:
        return TierFull(vram_advice(config, text, micro_batch))
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text or "can't allocate memory" in text:
        return TierFull(f"RAM is full ({text.splitlines()[0] if text else 'allocation failed'}). {ram_advice(config)}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        if getattr(error, "disk_full", False):  # the log's own error, in words already
            return TierFull(str(error))
        path = error.filename or getattr(error, "path", None)  # ours keep it in `path`
        where = f" that holds {path}" if path else ""
        return TierFull(
            f"The drive{where} is full ({error.strerror}). Free some space, lower --save_total_limit, or point "
            "--checkpoint_dir, --log_dir or --nvme_offload_path at another drive."
        )
    return None
