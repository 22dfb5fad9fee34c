"""Names, types and places of a GGUF file's tensors, and sizes that only its header tells.

The package gguf makes objects of every token in the header (seconds and tens of megabytes with 49,000 of them), so a
file is read once, and only this is kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

GGUF_SIZES = {".attention.key_length": "head_dim", ".expert_feed_forward_length": "moe_intermediate_size"}
"""End of a field's name -> name in a configuration, where transformers leaves the default of some model types."""


class GgufTensor(NamedTuple):
    """What a GGUF file's header tells of one tensor."""

    kind: str
    """Name of its type, as llama.cpp writes it."""
    shape: tuple[int, ...]
    """Rows first, as in torch."""
    n_bytes: int
    data_offset: int


class GgufHeader(NamedTuple):
    """Header of a GGUF file without its tokens, which are most of it."""

    tensors: Mapping[str, GgufTensor]
    sizes: Mapping[str, int]
    """Field of a configuration -> its number, for those of `GGUF_SIZES` that the file has."""


def gguf_header(file: Path) -> GgufHeader:
    """Read a file's header, once for a file as it is: it takes seconds. Raises whatever the package gguf does."""
    return _gguf_header(file, os.stat(file).st_mtime_ns)


@cache
def _gguf_header(file: Path, changed_ns: int) -> GgufHeader:
    import gguf

    reader = gguf.GGUFReader(file)
    tensors = {
        tensor.name: GgufTensor(
            tensor.tensor_type.name,
            tuple(int(size) for size in reversed(tensor.shape)),
            int(tensor.n_bytes),
            int(tensor.data_offset),
        )
        for tensor in reader.tensors
    }
    found = {name: full for full in reader.fields for key, name in GGUF_SIZES.items() if full.endswith(key)}
    return GgufHeader(tensors, {name: int(reader.fields[full].contents()) for name, full in found.items()})
