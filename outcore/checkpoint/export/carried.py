"""Parts that an export takes from the model that the run began from, byte for byte.

Tensors that the run's architecture does not know (MTP heads, towers, tables) under the names that they have there, and
known ones that were not trained in place of the run's own, where these are of another type. Files beside the weights
(processor, chat template, licence, code) that the run does not write itself. Cost: the headers of its files; a tensor
is read when its turn to be written comes."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from outcore.checkpoint.published import Tensors
from outcore.checkpoint.shards import CheckpointError, TensorPlan
from outcore.common.listing import CHECKSUMS
from outcore.data import ids_hash
from outcore.formats.checkpoint import PlainEntry, TensorPlace, open_safetensors, safetensors_places
from outcore.model import Origin
from outcore.model.weights import meta_skeleton, target_names

logger = logging.getLogger(__name__)

COPY_BYTES = 64 << 20
_BESIDE = re.compile(r"[^.]+|[^.].*\.(json|txt|md|py|jinja|model|spm|tiktoken|pdf|ya?ml)")
"""Files beside weights that go along: licence, processor, code, tokenizer. Weights in other formats do not."""
_OF_WEIGHTS = re.compile(r".*\.index\.json|(adapter|quantize|hf_quant)_config\.json|trainer_state\.json")
_TOKENIZER = re.compile(
    r"(tokenizer|vocab|merges|added_tokens|special_tokens|chat_template|tekken)[^/]*|.*\.(model|spm|tiktoken)"
)


@dataclass(frozen=True)
class Carried:
    """Tensors of the model that a run began from."""

    rest: Tensors = field(default_factory=dict)
    """Tensors that the run's architecture does not know."""
    known: Tensors = field(default_factory=dict)
    """Further ones that are stored plainly: what an export has by the same name, in the same shape, is the same weight.
    """
    origin: Origin | None = None

    def check(self) -> None:
        """RuntimeError where the files that were read have changed meanwhile."""
        if self.origin is not None and (why := self.origin.why_not()):
            raise RuntimeError(f"{why} while the model was exported, so it may be torn. Export the checkpoint again.")


def carried(origin: Origin | None, model: nn.Module) -> Carried:
    """Collect what an export of `model` (plain, or the one below adapters) takes from its origin. Nothing, with a
    warning, where the origin is not what it was or cannot be read."""
    from transformers import PreTrainedModel

    if origin is None or origin.is_gguf or not isinstance(model, PreTrainedModel):
        return Carried()
    why = origin.why_not()
    if not why:
        try:
            return _carried(origin, meta_skeleton(type(model), model.config))
        except (RuntimeError, ValueError, OSError) as error:
            why = str(error)
    tell_lost(origin.path, why)
    return Carried()


def tell_lost(path: str, why: str) -> None:
    """Warn that nothing is taken from the model called `path`, and what that means."""
    logger.warning(
        "the export has the weights that the run knows, and nothing else of %s: %s. Tensors that the architecture does "
        "not use (MTP heads, towers) and files such as its licence are left out, and weights that were not trained "
        "have the run's number type",
        path,
        why,
    )


def _carried(origin: Origin, skeleton: nn.Module) -> Carried:
    places = safetensors_places(origin.stamps)
    path = origin.folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    quantization = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    entries = open_safetensors(origin.stamps, quantization).entries if quantization else {}
    packed = {name for name, entry in entries.items() if not isinstance(entry, PlainEntry)}
    state, targets = skeleton.state_dict(), target_names(skeleton, {*places, *packed})
    # Codes, scales and what else a weight that the run has expanded was stored as.
    parts = _prefix_free(name.removesuffix("weight") for name in packed if targets[name][0] in state)
    names = [name for name in places if isinstance(entries.get(name), PlainEntry) or not _begins(name, parts)]
    rest = {name: _entry(name, places[name]) for name in names if targets[name][0] not in state}
    return Carried(rest, {name: _entry(name, places[name]) for name in names if name not in rest}, origin)


def _prefix_free(names: Iterable[str]) -> list[str]:
    """Sort the names, without those that begin with another one."""
    found: list[str] = []
    for name in sorted(names):
        if not found or not name.startswith(found[-1]):
            found.append(name)
    return found


def _begins(name: str, parts: list[str]) -> bool:
    """Tell whether the name begins with one of `_prefix_free` parts."""
    at = bisect_right(parts, name)
    return at > 0 and name.startswith(parts[at - 1])


def _entry(name: str, place: TensorPlace) -> tuple[TensorPlan, Any]:
    return TensorPlan(name, place.dtype, place.shape), place.read


def carry_files(origin: Origin | None, folder: Path) -> None:
    """Copy into `folder` the files beside the origin's weights that are not there yet. Files of its tokenizer only
    where the run's numbers tokens alike. OSError."""
    if origin is None or origin.is_gguf or origin.why_not():
        return
    there = {path.name for path in folder.iterdir()}
    has_template = any(name.startswith("chat_template") for name in there)
    wanted = [
        path
        for path in sorted(origin.folder.iterdir())
        if path.is_file()
        and path.name not in {*there, CHECKSUMS}
        and _BESIDE.fullmatch(path.name)
        and not _OF_WEIGHTS.fullmatch(path.name)
        and not (has_template and path.name.startswith("chat_template"))
    ]
    of_tokenizer = [path for path in wanted if _TOKENIZER.fullmatch(path.name)]
    if of_tokenizer and not _number_alike(origin.folder, folder, there):
        wanted = [path for path in wanted if path not in of_tokenizer]
    for path in wanted:
        try:
            copy_file(path, folder / path.name)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            logger.warning("%s is left out of the export: %s", path, error)


def _number_alike(one: Path, other: Path, there: set[str]) -> bool:
    from transformers import AutoTokenizer

    if not any(map(_TOKENIZER.fullmatch, there)):
        return True
    try:
        return ids_hash(AutoTokenizer.from_pretrained(one)) == ids_hash(AutoTokenizer.from_pretrained(other))
    except Exception as error:  # whatever a tokenizer's class finds in files that are not its own
        logger.warning("%s: its tokenizer's further files are left out: %s", one, error)
        return False


def copy_file(source: Path, target: Path) -> None:
    """Copy by copy_file_range, which shares blocks where the file system can. CheckpointError when it is short."""
    size_bytes = source.stat().st_size
    with open(source, "rb") as reader, open(target, "wb") as writer:
        done = 0
        try:
            while done < size_bytes:
                moved = os.copy_file_range(reader.fileno(), writer.fileno(), min(COPY_BYTES, size_bytes - done))
                if not moved:
                    break
                done += moved
        except (AttributeError, OSError) as error:  # not here, or not between these two file systems
            if done:
                raise
            shutil.copyfileobj(reader, writer, COPY_BYTES)
            del error
        writer.flush()
        os.fsync(writer.fileno())
    if target.stat().st_size != size_bytes:
        raise CheckpointError(f"{target}: {target.stat().st_size} of {size_bytes} bytes of {source} were copied.")
