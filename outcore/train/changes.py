"""Changes of a resumed run against the one that was saved: none, or on purpose (`--continue_with_changes`).

Words for a full tier: which one, by how much, and the one setting to change."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outcore.checkpoint import Checkpoint, check_same_run, differences
from outcore.checkpoint.export import FOLDER as EXPORT_FOLDER
from outcore.checkpoint.materials import SOURCE, Material, base_material, check_material, kept_material
from outcore.common.quantities import format_gib
from outcore.config import TrainConfig
from outcore.data import ids_hash
from outcore.sizing.engine_rule import BELOW_ZERO3
from outcore.train.configure.schedule import COSINE_FLOOR

ON_PURPOSE = ("schedule ", "train_batch_size", "seed", "rows")
"""Beginnings of what may change on purpose; another model, precision or adapter never may."""
COMPARED = ("dpo", "kto")
"""Methods that compare with the model as it was, which they ask again when they go on."""


def settle_changes(checkpoint: Checkpoint, fingerprint: dict[str, Any], *, on_purpose: bool) -> list[str]:
    """A line for each change that was made on purpose. CheckpointError for any other."""
    changed = differences(checkpoint, fingerprint)
    allowed = {name: values for name, values in changed.items() if on_purpose and name.startswith(ON_PURPOSE)}
    if allowed.keys() != changed.keys():
        check_same_run(checkpoint, fingerprint, allowed=frozenset(allowed))
    return [f"{name} {was} -> {now}" for name, (was, now) in allowed.items()]


def changed_by_version(checkpoint: Checkpoint, fingerprint: dict[str, Any], *, decay_all: bool) -> list[str]:
    """A line for what this version does otherwise than the one that made the checkpoint, whose settings are the same.

    Before the schedule's end was a setting, a cosine ended at a tenth of the peak. Before `decay_all` was one,
    norms and biases decayed, and a warm-up began above 0."""
    state = checkpoint.trainer_state()
    was, now, lines = state["fingerprint"].get("schedule", {}), fingerprint["schedule"], list[str]()
    if was.get("kind") == now["kind"] == "cosine" and "min_ratio" not in was and now["min_ratio"] != COSINE_FLOOR:
        lines.append(
            "this checkpoint is of a version whose cosine ended at a tenth of the peak; from here on it ends at "
            f"{now['min_ratio']:g} of it (--min_lr_ratio 0.1 keeps the former end)"
        )
    if was and "first" not in was and not now["first"] and checkpoint.step < now["warmup_steps"]:
        lines.append(
            "this checkpoint is of a version whose warm-up was a step ahead; from here on it is as HF Trainer's"
        )
    settings = state.get("settings", {})
    if settings.get("weight_decay") and "decay_all" not in settings and not decay_all:
        lines.append("this checkpoint is of a version in which norms and biases decayed; --decay_all goes on with that")
    return lines


def kept_tokenizer(config: TrainConfig, checkpoint: Checkpoint | None) -> Path | None:
    """Folder of the checkpoint's tokenizer, where nothing names another: one trained anew on data that has changed
    since would number other pieces. None where there is none that is whole."""
    if checkpoint is None or checkpoint.damaged_export or config.tokenizer_name_or_path or config.model_name_or_path:
        return None
    folder = checkpoint.path / EXPORT_FOLDER
    return folder if checkpoint.files(f"{EXPORT_FOLDER}/tokenizer") else None


def began_from(config: TrainConfig, name: str | None, source: Any) -> dict[str, Material]:
    """The model called `name`, whose transformers configuration is `source`, by its kind: the base below the run's
    adapters or of its comparisons, else the source that its weights began from."""
    if not name:
        return {}
    is_base = bool(config.lora_r) or config.method in COMPARED
    whole = is_base and config.base_hash == "whole"
    return {"base" if is_base else SOURCE: base_material(name, getattr(source, "_commit_hash", None), whole=whole)}


def settle_materials(
    config: TrainConfig,
    below: Mapping[str, Material],
    tokenizer: Any,
    checkpoint: Checkpoint | None,
    say: Callable[[str], None],
) -> dict[str, Material]:
    """The run's tokenizer, and what its weights began from. CheckpointError where the checkpoint has another tokenizer
    or base: no run may change these on its way, not on purpose either."""
    named = config.tokenizer_name_or_path or config.model_name_or_path
    found = {"tokenizer": Material(named or f"trained on {' and '.join(config.dataset)}", ids_hash(tokenizer)), **below}
    if checkpoint is None:
        return found
    for kind, now in found.items():
        was = kept_material(checkpoint, kind)
        if was is not None and kind == "tokenizer" and kept_tokenizer(config, checkpoint):
            found[kind] = was
            continue
        if kind == SOURCE:  # the weights that count are the checkpoint's
            if was is not None and was.content != now.content:
                say(
                    f"resume: {now.name} is not what the run began from: what is not trained of it will be as it is now"
                )
            continue
        found[kind] = check_material(checkpoint, kind, now)
        if now.whole and was is not None and not was.whole:
            say(f"resume: the checkpoint has samples of its {kind} only: by these it is the same")
    return found


class TierFull(RuntimeError):
    """VRAM, RAM or the drive is full; the message has the tier, the shortfall and the setting to change."""


def vram_advice(config: TrainConfig, message: str, micro_batch: int, engine: str = "deepspeed") -> str:
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
    return text + f". {_vram_setting(config, micro_batch, engine)}"


def _vram_setting(config: TrainConfig, micro_batch: int, engine: str) -> str:
    if micro_batch > 1:
        return (
            f"Use --per_device_train_batch_size {micro_batch // 2} (and twice the gradient_accumulation_steps: "
            "the result is the same)."
        )
    shorter = (
        f"--seq_length {config.seq_length // 2}" if config.seq_length else "--seq_length (half of the present one)"
    )
    if engine == "stream":
        return _stream_vram_setting(config, shorter)
    if config.activation_checkpointing is False:
        return "Use --activation_checkpointing true."
    if config.zero_stage in BELOW_ZERO3:
        return "Use --zero_stage zero3, which keeps parameters in RAM."
    return f"Use {shorter}."


def _stream_vram_setting(config: TrainConfig, shorter: str) -> str:
    """It recomputes layers anyway and keeps no state on the GPU: what is left is where checkpoints wait, and tiles."""
    if config.activations == "device":
        return "Use --activations ram, which keeps activation checkpoints off the GPU."
    if config.tiling == "off":
        return "Use --tiling auto, which computes what does not fit in tiles."
    if config.tiling == "auto":
        return f"Use --tiling on (layers and head in tiles: slower, far less memory), or {shorter}."
    return f"Use {shorter}."


def ram_advice(config: TrainConfig, engine: str = "deepspeed") -> str:
    """The one setting to change when RAM is full, and another where it costs something else."""
    if engine == "stream":
        return _stream_ram_setting(config)
    if config.zero_stage != "infinity":
        return "Use --zero_stage infinity --nvme_offload_path DIR, which keeps optimizer states on an NVMe drive."
    return "Use --lora_r 16 (adapters need no optimizer states for the base), or a smaller model."


def _stream_ram_setting(config: TrainConfig) -> str:
    budget_gib = config.ram_budget_gib
    states = config.state_format
    if config.nvme_offload_path is None:
        ways = ["--nvme_offload_path DIR (what RAM does not hold goes to that drive)"]
    elif budget_gib is None or budget_gib > 0:
        lower = f" {budget_gib / 2:g}" if budget_gib else ""
        ways = [f"a lower --ram_budget_gib{lower} (more goes to the drive)"]
    elif config.activations != "nvme":
        ways = ["--activations nvme (activation checkpoints go to the drive as well)"]
    else:
        ways = ["--max_grad_norm 0 (without clipping no gradient has to wait in RAM)"]
    if states in ("auto", "fp32", "split"):
        compact = "fp32_m8" if states == "fp32" or config.precision in ("fp16", "fp32") else "split8"
        ways.append(f"--state_format {compact} (8-bit moments: smaller states, other numerics)")
    else:
        ways.append("--lora_r 16 (adapters: no states for the base)")
    return f"Use {' or '.join(ways)}."


def explain(error: BaseException, config: TrainConfig, micro_batch: int, engine: str = "deepspeed") -> TierFull | None:
    """A TierFull for an error that means 'out of room', None for any other error. `engine`: whose settings to name."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "CUDA out of memory" in text:
        return TierFull(vram_advice(config, text, micro_batch, engine))
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text or "can't allocate memory" in text:
        why = text.splitlines()[0] if text else "allocation failed"
        return TierFull(f"RAM is full ({why}). {ram_advice(config, engine)}")
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
