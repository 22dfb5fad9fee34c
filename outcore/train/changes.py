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


def changed_by_version(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> list[str]:
    """A line for what this version does otherwise than the one that made the checkpoint, whose settings are the same.

    Until the schedule's end was a setting, a cosine ended at a tenth of the peak, and no checkpoint wrote it down."""
    was, now = checkpoint.trainer_state()["fingerprint"].get("schedule", {}), fingerprint["schedule"]
    if was.get("kind") != "cosine" or "min_ratio" in was or now["kind"] != "cosine":
        return []
    if now["min_ratio"] == COSINE_FLOOR:
        return []
    return [
        f"this checkpoint is of a version whose cosine ended at a tenth of the peak; from here on it ends at "
        f"{now['min_ratio']:g} of it (--min_lr_ratio 0.1 keeps the former end)"
    ]
