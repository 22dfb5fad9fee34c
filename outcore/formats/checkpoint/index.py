"""The index of a published checkpoint: name -> entry, whatever it is quantized with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outcore.formats.checkpoint.methods import METHODS
from outcore.formats.checkpoint.places import Entry, ExpandedEntry, PackedEntry, PlainEntry, safetensors_places


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

    RuntimeError for a method that is not known, naming those that are, and for files that are damaged."""
    if why := why_not_read(quantization):
        raise RuntimeError(why)
    method = method_of(quantization)
    places = safetensors_places(files)
    entries = METHODS[method](places, quantization)
    entries |= {name: PlainEntry(place) for name, place in places.items()}
    return PackedCheckpoint(entries, method, notes_on(entries))


GGUF = "gguf"
"""What the configuration of a GGUF file names as its method."""
KEPT = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
"""Types of a GGUF file that stay packed."""


def method_of(quantization: Mapping[str, Any]) -> str:
    """The quantization method of a `quantization_config`; '' when it names none."""
    method = str(quantization.get("quant_method") or "").lower().removeprefix("quantizationmethod.")
    if not method and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        return "bitsandbytes"  # its older configurations do not say so
    return method


def why_not_read(quantization: Mapping[str, Any]) -> str:
    """Why a checkpoint with this `quantization_config` cannot be read; '' when its method is known."""
    method = method_of(quantization)
    if method in METHODS or method == GGUF:
        return ""
    return (
        f"its weights are stored quantized by {method or 'an unknown method'!r}; known are {', '.join(METHODS)}. Take "
        "a checkpoint in one of these, or one that is not quantized"
    )


def usual_format(quantization: Mapping[str, Any]) -> str | None:
    """The format that most weights of such a checkpoint have: for sizes before its files are read. None: not packed."""
    method = method_of(quantization)
    if method == GGUF:
        return _kept(quantization["format"]) or None
    if method == "bitsandbytes":
        return "int8" if quantization.get("load_in_8bit") else "nf4"
    is_fp8 = method == "fp8" or quantization.get("format") in ("float-quantized", "naive-quantized")
    return "fp8_128" if is_fp8 else "mxfp4" if method == "mxfp4" else "int4_128_fp16_zero"


def formats_of_ends(quantization: Mapping[str, Any]) -> tuple[str, str]:
    """Formats of the matrices of embedding and head, which only GGUF files pack; '': not packed."""
    embedding, head = quantization["ends"] if method_of(quantization) == GGUF else ("", "")
    return _kept(embedding), _kept(head)


def _kept(kind: str) -> str:
    return kind if kind.upper() in KEPT else ""


def notes_on(entries: dict[str, Entry]) -> tuple[str, ...]:
    """What of a checkpoint is expanded when it is read, and why."""
    whys = Counter(entry.why for entry in entries.values() if isinstance(entry, ExpandedEntry) and entry.why)
    return tuple(f"{count} weights are expanded to 16 bits when they are read: {why}" for why, count in whys.items())
