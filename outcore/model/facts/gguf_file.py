"""Names, types and places of a GGUF file's tensors, and the sizes and token ids that its header tells.

A header is mostly tokens and merges: half a million texts for a vocabulary of 128,000. They are stepped over here, in
0.05 s, where the package gguf makes an object of each, in 10 s (a quiet core)."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Version 1 counted in 32 bits; no published file has it."""
ALIGNMENT_BYTES = 32
"""Tensors begin on multiples of it in a file that does not say."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")

MODEL_TYPES: Mapping[str, str] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""Architecture of a file -> transformers' model_type, for those that are read here."""
_CONFIG = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_TOKEN_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
_TOKENS = "tokenizer.ggml.tokens"


class GgufTensor(NamedTuple):
    """Entry of one tensor in a GGUF file's header."""

    kind: str
    """Name of its type, as llama.cpp writes it."""
    shape: tuple[int, ...]
    """Rows first, as in torch."""
    n_bytes: int
    data_offset: int


class GgufHeader(NamedTuple):
    """Header of a GGUF file without its tokens, which are most of it."""

    tensors: Mapping[str, GgufTensor]
    fields: Mapping[str, Any]
    """Name -> value; of a list of texts its length alone."""


def gguf_header(file: Path) -> GgufHeader:
    """Read a file's header, once for a file as it is. ValueError saying what is wrong with it."""
    about = os.stat(file)
    return _gguf_header(file.absolute(), about.st_size, about.st_mtime_ns)


def gguf_config_fields(header: GgufHeader) -> dict[str, Any]:
    """The configuration that a header tells, in transformers' names, with `model_type`.

    ValueError for an architecture that is not read here."""
    fields, architecture = header.fields, str(header.fields.get("general.architecture"))
    if architecture not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ValueError(f"its architecture is {architecture!r}; files are read for {known}. Take safetensors instead")
    told = {name: fields[full] for key, name in _CONFIG.items() if (full := f"{architecture}.{key}") in fields}
    told |= {
        name: fields[full] for key, name in _TOKEN_IDS.items() if (full := f"tokenizer.ggml.{key}_token_id") in fields
    }
    # Llama's files tell the size of a head as the rotated share of it, which is all of it.
    for key in ("rope.dimension_count",) * (architecture == "llama") + ("attention.key_length",) * (
        architecture != "qwen2"
    ):
        if f"{architecture}.{key}" in fields:
            told["head_dim"] = fields[f"{architecture}.{key}"]
    if "vocab_size" not in told and _TOKENS in fields:
        told["vocab_size"] = fields[_TOKENS]
    if architecture == "qwen3moe":
        told["norm_topk_prob"] = True  # the file does not say; llama.cpp computes it so
    return told | {
        "model_type": MODEL_TYPES[architecture],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


@cache
def _gguf_header(file: Path, size_bytes: int, changed_ns: int) -> GgufHeader:
    if not size_bytes:
        raise ValueError("it is empty")
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        try:
            return _parsed(_HeaderBytes(raw), size_bytes)
        except (struct.error, KeyError) as error:
            raise ValueError(f"its header is damaged or cut off ({error})") from error


def _parsed(header: _HeaderBytes, size_bytes: int) -> GgufHeader:
    import gguf

    if header.take(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    (version, n_tensors, n_fields) = header.numbers("IQQ")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}; versions 2 and 3 are read")
    fields = {header.text(): header.value() for _ in range(n_fields)}
    told = []
    for _ in range(n_tensors):
        name, (n_dims,) = header.text(), header.numbers("I")
        shape = header.numbers(f"{n_dims}Q")[::-1]
        told.append((name, shape, *header.numbers("IQ")))
    alignment = fields.get("general.alignment", ALIGNMENT_BYTES)
    data_begin = -(-header.at // alignment) * alignment
    tensors = {}
    for name, shape, number, offset in told:
        kind = gguf.GGMLQuantizationType(number)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        tensors[name] = GgufTensor(kind.name, shape, prod(shape) // block * block_bytes, data_begin + offset)
    needed = max((tensor.data_offset + tensor.n_bytes for tensor in tensors.values()), default=0)
    if needed > size_bytes:
        raise ValueError(f"it is cut off: {size_bytes:,} bytes of at least {needed:,}")
    return GgufHeader(tensors, fields)


class _HeaderBytes:
    """A header that is read from its beginning; struct.error where it ends too early."""

    def __init__(self, raw: mmap.mmap) -> None:
        self._raw, self.at = raw, 0

    def take(self, n_bytes: int) -> bytes:
        if self.at + n_bytes > len(self._raw):
            raise struct.error(f"a text of {n_bytes:,} bytes at {self.at:,}")
        self.at += n_bytes
        return self._raw[self.at - n_bytes : self.at]

    def numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._raw, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def text(self) -> str:
        return self.take(*self.numbers("Q")).decode("utf-8")

    def value(self) -> Any:
        return self._of_kind(*self.numbers("I"))

    def _of_kind(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.numbers(_NUMBERS[kind])[0]
        of, count = self.numbers("IQ")
        if of == _TEXT:
            self._pass_texts(count)
            return count
        return self.numbers(f"{count}{_NUMBERS[of]}") if of in _NUMBERS else [self._of_kind(of) for _ in range(count)]

    def _pass_texts(self, count: int) -> None:
        raw, at, length_of = self._raw, self.at, _LENGTH.unpack_from
        for _ in range(count):
            at += 8 + length_of(raw, at)[0]
        self.at = at
