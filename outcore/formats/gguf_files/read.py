"""A GGUF file as a packed checkpoint: its blocks stay as they are, under the model's names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from outcore.formats.checkpoint import (
    KEPT,
    Entry,
    ExpandedEntry,
    PackedCheckpoint,
    PackedEntry,
    PlainEntry,
    TensorPlace,
    notes_on,
)
from outcore.formats.gguf_files.rules import gguf_names, row_order
from outcore.formats.packed import PackedSpec
from outcore.formats.registry import packed_format

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_gguf(file: Path, config: Any, names: list[str]) -> PackedCheckpoint:
    """Index a GGUF file for a model with this config and these parameters (as `named_parameters` calls them).

    Tied weights may be missing. GgufRefused for an architecture that is not known, RuntimeError for a damaged file."""
    import gguf

    try:
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    except (OSError, ValueError, IndexError) as error:
        raise RuntimeError(f"{file} is not a GGUF file, or is damaged: {error}") from error
    entries: dict[str, Entry] = {}
    for name, key in gguf_names(config, names).items():
        if key in tensors:
            entries[name] = _entry(file, tensors[key], row_order(config, name, to_file=False))
    return PackedCheckpoint(entries, f"GGUF file {file.name}", notes_on(entries))


def _entry(file: Path, tensor: Any, order: torch.Tensor | None) -> Entry:
    kind, shape = tensor.tensor_type.name, tuple(int(size) for size in reversed(tensor.shape))
    if kind in PLAIN:
        place = TensorPlace(file, int(tensor.data_offset), PLAIN[kind], shape)
        if order is None:
            return PlainEntry(place)
        return ExpandedEntry(shape, "", {"value": place}, lambda parts: parts["value"][order])
    parts = {"blocks": TensorPlace(file, int(tensor.data_offset), torch.uint8, (int(tensor.n_bytes),))}
    if kind in KEPT:
        spec = PackedSpec(packed_format(kind.lower()), shape)
        return PackedEntry(spec, parts, partial(_blocks, rows=shape[0], order=order))
    return ExpandedEntry(shape, f"GGUF type {kind}", parts, partial(_dequantized, kind=kind, shape=shape, order=order))


def _blocks(parts: dict[str, torch.Tensor], rows: int, order: torch.Tensor | None) -> tuple[torch.Tensor]:
    blocks = parts["blocks"].view(rows, -1)
    return (blocks if order is None else blocks[order],)


def _dequantized(
    parts: dict[str, torch.Tensor], kind: str, shape: tuple[int, ...], order: torch.Tensor | None
) -> torch.Tensor:
    import gguf

    raw = parts["blocks"].view(shape[0], -1).numpy()
    value = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])).view(shape)
    return value if order is None else value[order]
