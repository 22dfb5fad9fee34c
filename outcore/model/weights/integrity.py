"""Whether a folder of weights is what was written: no shard outside it, and checksums where an export left them.

outcore's exports carry `outcore-checksums.json`; reading every byte once against it costs a second for some GB. A
configuration or a chat template may have been edited since: that is said, damaged weights are refused."""

from __future__ import annotations

import json
from pathlib import Path

from outcore.common import file_errors, inside
from outcore.common.listing import DamagedListing, damaged_weights

INDEX = "model.safetensors.index.json"


def check_weight_files(path: str | None) -> tuple[str, ...]:
    """Notes for people. RuntimeError for damaged weights, ValueError for an index that leads out of the folder."""
    if path is None or not Path(path).is_dir():
        return ()
    folder = Path(path)
    _check_index(folder)
    try:
        with file_errors("verifying the weights", folder):
            damaged, changed = damaged_weights(folder)
    except DamagedListing as error:
        raise RuntimeError(f"{error} Remove it if you trust the weights, or export the model again.") from error
    if damaged:
        raise RuntimeError(
            f"The weights are damaged or cut short: {damaged[0]} Copy or download them again, or export the model "
            "again from its checkpoint."
        )
    return tuple(f"changed since the export: {words}" for words in changed)


def _check_index(folder: Path) -> None:
    index = folder / INDEX
    if not index.is_file():
        return
    try:
        with file_errors("reading the index of the weights", index):
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for name in names:
            inside(folder, name, follow_links=True)  # the hub's own cache is made of links
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: its weight_map cannot be used: {error}.") from error
