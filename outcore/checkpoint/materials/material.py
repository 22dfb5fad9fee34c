"""Materials of a run beside its settings: a tokenizer, and the base below an adapter; known again by their content.

Names say little: a folder is overwritten, a hub's branch moves on, and a tokenizer of the same size numbers other
pieces. A checkpoint keeps a hash of each with the name that the user gave it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outcore.checkpoint.folders import Checkpoint
from outcore.checkpoint.manifest import CheckpointError
from outcore.checkpoint.materials.weights import weights_hashes

SOURCE = "source"
"""The model that a run of full training began from."""
_MEANS = {
    "tokenizer": "its token ids mean other pieces of text",
    "base": "the adapter was trained over other weights",
}


@dataclass(frozen=True)
class Material:
    """One thing that a run is made of."""

    name: str
    """Name by which the user gave it, a hub's with its commit."""
    content: str
    """Hash of its content; of a base of samples of it."""
    whole: str = ""
    """Hash of every byte of a base, where that was asked for."""

    @property
    def path(self) -> str:
        """The name without its commit, by which a base or source is opened."""
        return self.name.partition(" (commit ")[0]

    @property
    def commit(self) -> str | None:
        """The hub's commit of a base or source; None: a folder, or unknown."""
        return self.name.partition(" (commit ")[2].rstrip(")") or None


def base_material(name: str, commit: str | None = None, *, whole: bool = False) -> Material:
    """The base called `name`: folder, GGUF file or hub id. RuntimeError or FileError when it cannot be read."""
    return Material(f"{name} (commit {commit})" if commit else name, *weights_hashes(name, whole=whole))


def kept_material(checkpoint: Checkpoint, kind: str) -> Material | None:
    """The checkpoint's `tokenizer` or `base`; None where it was written by a version that kept none, or has none."""
    kept = checkpoint.trainer_state().get("made_of", {}).get(kind)
    return None if kept is None else Material(**kept)


def check_material(checkpoint: Checkpoint, kind: str, now: Material) -> Material:
    """The `tokenizer` or `base`, with what the checkpoint knows of it. CheckpointError, with both names, where the
    checkpoint was made with another."""
    was = kept_material(checkpoint, kind)
    if was is None:
        return now
    if was.content == now.content and (not now.whole or was.whole in ("", now.whole)):
        return replace(now, whole=now.whole or was.whole)
    if was.name == now.name:
        other, way = f"{now.name} has changed since", "Bring it back as it was"
    else:
        other, way = f"{now.name} is another one", f"Resume with the {kind} {was.name}"
    raise CheckpointError(
        f"{checkpoint.path}: was made with the {kind} {was.name}, and {other}: {_MEANS[kind]}. {way}, or start a new "
        "run."
    )
