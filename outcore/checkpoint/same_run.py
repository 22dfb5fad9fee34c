"""Whether a checkpoint is of the run that resumes from it: settings, model, and what a run may change on its way."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from outcore.checkpoint.folders import Checkpoint
from outcore.checkpoint.manifest import CheckpointError
from outcore.optim import state_format

_FLAGS_OF = {
    "train_batch_size": "--per_device_train_batch_size x --gradient_accumulation_steps x processes",
    "schedule kind": "--lr_scheduler_type",
    "schedule peak_lr": "--learning_rate",
    "schedule warmup_steps": "--warmup_steps",
    "schedule total_steps": "--max_steps or --num_train_epochs",
}
_NOT_THE_MODEL = frozenset(
    {"transformers_version", "_name_or_path", "name_or_path", "dtype", "torch_dtype", "use_cache", "architectures"}
    | {"attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_commit_hash", "id2label"}
    | {"label2id", "bos_token_id", "eos_token_id", "pad_token_id", "problem_type", "return_dict", "output_attentions"}
    | {"output_hidden_states", "chunk_size_feed_forward"}
)
"""Fields of a configuration that change nothing that a trained model computes, or that code sets as it runs."""


def model_fingerprint(config: Any) -> dict[str, Any] | None:
    """Select what a transformers configuration says of the mathematics (heads, rope, eps, ...); None without one."""
    if config is None or not hasattr(config, "to_dict"):
        return None
    text = json.dumps(_without(config.to_dict()), sort_keys=True, default=str)
    return json.loads(text)


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _without(v) for k, v in value.items() if str(k) not in _NOT_THE_MODEL}
    return [_without(v) for v in value] if isinstance(value, list | tuple) else value


def config_sha256(model: dict[str, Any] | None) -> str | None:
    """Hash of a `model_fingerprint`, for the manifest."""
    return None if model is None else hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()


def differences(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(what it was, what it is) by name, of what the checkpoint's run had otherwise than `fingerprint` (nested by one
    level). What an older version did not write down is not compared; a model's field that only one of the two has is.
    """
    theirs, mine = (_flat(f) for f in (checkpoint.trainer_state()["fingerprint"], fingerprint))
    found = {name: (theirs[name], value) for name, value in mine.items() if theirs.get(name, value) != value}
    if "model" in fingerprint and any(name.startswith("model ") for name in theirs):
        for name in sorted(theirs.keys() ^ mine.keys()):
            if name.startswith("model "):
                found[name] = theirs.get(name), mine.get(name)
    return found


def check_same_run(checkpoint: Checkpoint, fingerprint: dict[str, Any], allowed: frozenset[str] = frozenset()) -> None:
    """Raise CheckpointError when the checkpoint's run had settings other than `fingerprint` and `allowed`."""
    found = differences(checkpoint, fingerprint)
    # Warm-up and decay follow from the number of steps: who changed that is told so.
    for name, (was, value) in sorted(found.items(), key=lambda item: item[0] != "schedule total_steps"):
        if name in allowed:
            continue
        if name == "parameters":
            raise CheckpointError(
                f"{checkpoint.path}: is of another model: it has {was:,} parameters, this run's model {value:,}. "
                "Resume with the model, preset and LoRA settings that it was made with."
            )
        if name.startswith("model "):
            raise CheckpointError(
                f"{checkpoint.path}: is of another model: its configuration has {name.removeprefix('model ')} {was!r}, "
                f"this run's model {value!r}, so its weights would mean something else. Resume with the model as it "
                "was, or start a new run from the exported model (--model_name_or_path)."
            )
        raise CheckpointError(
            f"{checkpoint.path}: was made with {name} {was!r}, this run has {value!r}: it would not continue the same "
            f"training. Use the same {_FLAGS_OF.get(name, '--' + name)}, {_way_on(name)}."
        )


def _way_on(name: str) -> str:
    if name.startswith(("schedule ", "train_batch_size", "seed")):
        return "or add --continue_with_changes to go on with the new value"
    return "or start a new run from the exported model (--model_name_or_path)"


def changed_settings(checkpoint: Checkpoint, settings: dict[str, Any]) -> list[str]:
    """A line for people for each of `settings`, which a run may change on its way, that the checkpoint had otherwise.

    What an older version did not write down is not compared."""
    theirs = checkpoint.trainer_state().get("settings", {})
    lines = []
    for name, value in settings.items():
        was = theirs.get(name, value)
        if was == value:
            continue
        line = f"resume: {name} {was} -> {value}: training goes on with {value}"
        if name == "state_format":
            after, before = state_format(value), state_format(was)
            rounded = ["the moments are rounded to 8 bits"] * (after.moments8 and not before.moments8)
            rounded += ["the masters are rounded to 24 bits"] * (after.short_residual and not before.short_residual)
            line += f"; {' and '.join(rounded)} once" if rounded else "; the states are converted exactly"
        lines.append(line)
    return lines


def _flat(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """{'schedule': {'total_steps': 5}} as {'schedule total_steps': 5}."""
    flat: dict[str, Any] = {}
    for name, value in fingerprint.items():
        flat.update({f"{name} {k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value})
    return flat
