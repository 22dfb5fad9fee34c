"""What a resumed run does otherwise than the run that was saved: nothing, or on purpose (`--continue_with_changes`)."""

from __future__ import annotations

from typing import Any

from outcore.checkpoint import Checkpoint, check_same_run, differences

ON_PURPOSE = ("schedule ", "train_batch_size", "seed")
"""Beginnings of what may change on purpose; another model, precision or adapter never may."""


def settle_changes(checkpoint: Checkpoint, fingerprint: dict[str, Any], *, on_purpose: bool) -> list[str]:
    """A line for each change that was made on purpose. CheckpointError for any other."""
    changed = differences(checkpoint, fingerprint)
    allowed = {name: values for name, values in changed.items() if on_purpose and name.startswith(ON_PURPOSE)}
    if allowed.keys() != changed.keys():
        check_same_run(checkpoint, fingerprint, allowed=frozenset(allowed))
    return [f"{name} {was} -> {now}" for name, (was, now) in allowed.items()]
