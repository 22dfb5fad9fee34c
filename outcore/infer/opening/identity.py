"""Which bytes a model is: a name that changes when its weights do."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from outcore.infer.opening.model import MANIFEST, FoundModel

HASHED_BYTES = 1 << 20
"""Bytes hashed of each file of weights, from its beginning (the names and shapes of its tensors, and values)."""
WEIGHTS = ("config.json", "adapter_config.json", "*.safetensors", "*.gguf")


def model_hash(folders: Sequence[str]) -> str:
    """Name of a model's bytes, and of its adapter's: config, and size and beginning of each file of weights; of a
    checkpoint its manifest, which names every file with its checksum. '' where they are not on this machine."""
    parts = [_of_place(Path(folder), with_times=False) for folder in folders]
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return parts[0] if parts else ""
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


def bytes_of(found: FoundModel) -> list[str]:
    """Name as `model_hash` does, one name each, and with the times of files: weights that were overwritten in place
    have another name. A hub id is named by its commit. ValueError where nothing names them."""
    names = []
    for folder in found.folders:
        name = _of_place(Path(folder), with_times=True) or str(getattr(found.loaded.config, "_commit_hash", None) or "")
        if not name:
            raise ValueError(f"prefix_path: nothing tells which weights {folder} are, so nothing can be kept for them.")
        names.append(name)
    return names


def _of_place(place: Path, *, with_times: bool) -> str:
    manifest = place / MANIFEST
    if manifest.is_file():
        return hashlib.blake2b(manifest.read_bytes(), digest_size=16).hexdigest()
    files = [place] if place.is_file() else sorted({path for kind in WEIGHTS for path in place.glob(kind)})
    if not files:
        return ""
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        status = path.stat()
        found.update(f"{path.name} {status.st_size}{f' {status.st_mtime_ns}' if with_times else ''}".encode())
        with open(path, "rb") as file:
            found.update(file.read(HASHED_BYTES))
    return found.hexdigest()
