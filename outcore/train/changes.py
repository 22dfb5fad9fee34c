"""What a resumed run does otherwise than the run that was saved: nothing, or on purpose (`--continue_with_changes`)."""

from __future__ import annotations

from typing import Any

from outcore.checkpoint import Checkpoint, check_same_run, differences
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
