"""A GGUF file as a packed checkpoint: its blocks stay as they are, under the model's names."""

from __future__ import annotations

from functools import partial
from math import prod
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
from outcore.model.facts import GgufTensor, gguf_header

Parts = dict[str, torch.Tensor]
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_gguf(file: Path, config: Any, names: list[str]) -> PackedCheckpoint:
    """Index a GGUF file for a model with this config and these parameters (as `named_parameters` calls them).

    Tied weights may be missing. GgufRefused for an architecture that is not known, RuntimeError for a damaged file."""
    try:
        tensors = gguf_header(file).tensors
    except (OSError, ValueError, IndexError) as error:
        raise RuntimeError(f"{file} is not a GGUF file, or is damaged: {error}") from error
    entries: dict[str, Entry] = {}
    for name, keys in gguf_names(config, names, to_file=False).items():
        if all(key in tensors for key in keys):
            entries[name] = _entry(file, {key: tensors[key] for key in keys}, row_order(config, name, to_file=False))
    return PackedCheckpoint(entries, f"GGUF file {file.name}", notes_on(entries))


def _entry(file: Path, tensors: dict[str, GgufTensor], order: torch.Tensor | None) -> Entry:
    """One weight of one tensor, or of several [experts, rows, columns]: each expert's rows of all of them in turn."""
    kinds, shapes = [tensor.kind for tensor in tensors.values()], [tensor.shape for tensor in tensors.values()]
    shape = shapes[0] if len(tensors) == 1 else (shapes[0][0], sum(rows for _, rows, _ in shapes), shapes[0][2])
    parts = {}
    for key, tensor in tensors.items():
        dtype, place = (PLAIN[tensor.kind], tensor.shape) if tensor.kind in PLAIN else (torch.uint8, (tensor.n_bytes,))
        parts[key] = TensorPlace(file, tensor.data_offset, dtype, place)
    if kinds[0] in KEPT and len(set(kinds)) == 1:
        spec = PackedSpec(packed_format(kinds[0].lower()), shape)
        return PackedEntry(spec, parts, partial(_blocks, rows=shape[0], order=order))
    if kinds[0] in PLAIN and len(tensors) == 1 and order is None:
        return PlainEntry(*parts.values())
    why = " and ".join(sorted({f"GGUF type {kind}" for kind in kinds if kind not in PLAIN}))
    return ExpandedEntry(shape, why, parts, partial(_values, kinds=kinds, shapes=shapes, order=order))


def _blocks(parts: Parts, rows: int, order: torch.Tensor | None) -> tuple[torch.Tensor]:
    blocks = [raw.view(rows, -1) for raw in parts.values()]
    joined = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
    return (joined if order is None else joined[order],)


def _values(parts: Parts, kinds: list[str], shapes: list[tuple[int, ...]], order: torch.Tensor | None) -> torch.Tensor:
    values = [_value(raw, kind, shape) for raw, kind, shape in zip(parts.values(), kinds, shapes, strict=True)]
    joined = values[0] if len(values) == 1 else torch.cat([value.float() for value in values], 1)
    return joined if order is None else joined[order]


def _value(raw: torch.Tensor, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    import gguf

    if kind in PLAIN:
        return raw
    blocks = raw.view(-1, raw.numel() // prod(shape[:-1])).numpy()
    return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])).view(shape)
