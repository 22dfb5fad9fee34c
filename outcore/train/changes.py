"""What a resumed run does otherwise than the run that was saved: nothing, or on purpose (`--continue_with_changes`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from outcore.checkpoint import Checkpoint, check_same_run, differences
from outcore.checkpoint.export import FOLDER as EXPORT_FOLDER
from outcore.checkpoint.materials import Material, base_material, check_material, kept_material
from outcore.config import TrainConfig
from outcore.data import ids_hash
from outcore.model import ModelSettings, resolve_source
from outcore.train.configure.schedule import COSINE_FLOOR

ON_PURPOSE = ("schedule ", "train_batch_size", "seed")
"""Beginnings of what may change on purpose; another model, precision or adapter never may."""


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


def settle_materials(
    config: TrainConfig,
    model: ModelSettings,
    tokenizer: Any,
    checkpoint: Checkpoint | None,
    say: Callable[[str], None],
) -> dict[str, Material]:
    """The run's tokenizer and, below an adapter, its base. CheckpointError where the checkpoint has others: no run may
    change these on its way, not on purpose either."""
    named = config.tokenizer_name_or_path or config.model_name_or_path
    found = {"tokenizer": Material(named or f"trained on {' and '.join(config.dataset)}", ids_hash(tokenizer))}
    if config.lora_r and model.model_name_or_path:
        commit = getattr(resolve_source(model).config, "_commit_hash", None)
        found["base"] = base_material(model.model_name_or_path, commit, whole=config.base_hash == "whole")
    if checkpoint is None:
        return found
    for kind, now in found.items():
        was = kept_material(checkpoint, kind)
        if was is not None and kind == "tokenizer" and kept_tokenizer(config, checkpoint):
            found[kind] = was
            continue
        found[kind] = check_material(checkpoint, kind, now)
        if now.whole and was is not None and not was.whole:
            say(f"resume: the checkpoint has samples of its {kind} only: by these it is the same")
    return found
