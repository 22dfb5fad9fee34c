"""The index of a published checkpoint: name -> entry, whatever it is quantized with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outcore.formats.checkpoint.entries import Entry, ExpandedEntry, PackedEntry, PlainEntry
from outcore.formats.checkpoint.methods import METHODS
from outcore.formats.checkpoint.places import safetensors_places


@dataclass(frozen=True)
class PackedCheckpoint:
    """Every weight of a checkpoint by the name that it has without quantization."""

    entries: dict[str, Entry]
    method: str
    """What it is quantized with, for people."""
    notes: tuple[str, ...] = field(default=())
    """What a person should know of it."""

    @property
    def formats(self) -> dict[str, int]:
        """Weights in each packed format."""
        return dict(Counter(e.spec.format.name for e in self.entries.values() if isinstance(e, PackedEntry)))


def open_safetensors(files: Iterable[Path], quantization: dict[str, Any]) -> PackedCheckpoint:
    """Index the files of a checkpoint whose config.json has this `quantization_config`.

    RuntimeError for a method that is not known, naming those that are, and for files that are damaged.
    """
    method = str(quantization.get("quant_method") or "").lower()
    if not method and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        method = "bitsandbytes"  # its older configurations do not say so
    if method not in METHODS:
        raise RuntimeError(
            f"its weights are stored quantized by {method or 'an unknown method'!r}; known are {', '.join(METHODS)} "
            "and GGUF files. Take a checkpoint in one of these, or one that is not quantized"
        )
    places = safetensors_places(files)
    entries = METHODS[method](places, quantization)
    entries |= {name: PlainEntry(place) for name, place in places.items()}
    return PackedCheckpoint(entries, method, notes_on(entries))


def notes_on(entries: dict[str, Entry]) -> tuple[str, ...]:
    """What of a checkpoint is expanded when it is read, and why."""
    whys = Counter(entry.why for entry in entries.values() if isinstance(entry, ExpandedEntry))
    return tuple(f"{count} weights are expanded to 16 bits when they are read: {why}" for why, count in whys.items())
