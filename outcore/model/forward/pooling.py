"""Way in which an embedder makes one vector of a text, kept where sentence-transformers keeps it.

Beside the weights lie `modules.json` and `1_Pooling/config.json`: so what was trained here opens there, and what was
trained there answers here as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, cast

from outcore.common import file_errors

Pooling = Literal["mean", "last"]
"""The mean of a text's last hidden states, or that of its last token."""
_FILE = "1_Pooling/config.json"
_NAMES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
_MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))


def read_pooling(name: str) -> Pooling | None:
    """Read how the model of this folder or hub id pools; None: nothing says. ValueError for a way that is not here."""
    from transformers.utils.hub import cached_file

    if not name or Path(name).is_file():
        return None
    try:
        path = cached_file(
            name, _FILE, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    except OSError:  # neither a folder nor a model that the hub lets us see: whoever loads it says so
        return None
    if path is None:
        return None
    with file_errors("reading how the model pools", Path(path)):
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    given = found.get("pooling_mode")
    modes = [given] if isinstance(given, str) else list(given or ())
    modes += [key for key, value in found.items() if key.startswith("pooling_mode_") and value is True]
    ways = {"mean": "mean", "lasttoken": "last", **_NAMES}
    if len(modes) != 1 or modes[0] not in ways:
        raise ValueError(
            f"{name} pools by {', '.join(map(str, modes)) or 'nothing'}; here it is the mean, or the last token."
        )
    return cast(Pooling, ways[modes[0]])


def write_pooling(folder: Path, pooling: Pooling, width: int) -> None:
    """Say so beside an exported model whose hidden states are `width` wide."""
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(_MODULES)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2), encoding="utf-8")
    (folder / _FILE).parent.mkdir(exist_ok=True)
    modes = {key: way == pooling for key, way in _NAMES.items()}
    said = {
        "word_embedding_dimension": width,
        "pooling_mode_cls_token": False,
        "pooling_mode_max_tokens": False,
        **modes,
    }
    (folder / _FILE).write_text(json.dumps(said, indent=2), encoding="utf-8")
