"""A folder that `from_pretrained` loads as one GGUF file, a tensor at a time: f16, q8_0 or q4_k."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from outcore.common.os_layer import replace_file
from outcore.formats.checkpoint import TensorPlace, safetensors_places
from outcore.formats.ggml import packed_format
from outcore.formats.gguf_files.read import (
    GgufRefused,
    add_tokenizer,
    architecture_of,
    gguf_names,
    rope_theta,
    row_order,
)
from outcore.formats.packed import PackedSpec
from outcore.model.facts import end_ids

ENDS = ("token_embd.weight", "output.weight")
"""Kept in more bits in a q4_k file: errors in them reach every token."""
FILE_TYPES = {"f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_k": "MOSTLY_Q4_K_M"}


class _Tensor(NamedTuple):
    key: str
    name: str
    place: TensorPlace
    kind: str


def default_file(folder: Path, kind: str) -> Path:
    """Beside the model's own files: NAME-KIND.gguf."""
    return folder / f"{folder.absolute().name}-{kind}.gguf"


def write_gguf(folder: Path, target: Path, kind: str, *, overwrite: bool = False) -> Path:
    """Write `target` from the safetensors, config and tokenizer of `folder`; it appears whole or not at all.

    GgufRefused for a model or tokenizer that has no GGUF form here, and for a file that is there already unless
    `overwrite` says to replace it. Memory: one tensor.
    """
    import gguf
    from transformers import AutoConfig

    if target.is_dir():
        raise GgufRefused(f"{target} is a folder: --out names the file to write.")
    if target.suffix.lower() != ".gguf":  # what reads such files knows them by it
        raise GgufRefused(f"{target}: a GGUF file's name ends with .gguf: --out {target}.gguf")
    if target.exists() and not overwrite:
        raise GgufRefused(f"{target} is there already. Give another file with --out, or --overwrite replaces it.")
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise GgufRefused(
            f"{folder} holds no model (config.json and safetensors), which a GGUF file is made of. `outcore export RUN "
            "--out FOLDER` makes such a folder of a run, of LoRA with --merge."
        )
    config = AutoConfig.from_pretrained(folder)
    architecture = architecture_of(config, to_file=True)
    places = safetensors_places(sorted(folder.glob("*.safetensors")))
    keys = {name: key for name, (key,) in gguf_names(config, list(places), to_file=True).items()}
    tensors = [_Tensor(keys[name], name, place, _kind_of(keys[name], place, kind)) for name, place in places.items()]
    partial = target.with_name(target.name + ".partial")
    writer = gguf.GGUFWriter(partial, architecture)
    try:
        _add_facts(writer, config, kind, folder)
        for tensor in tensors:
            data_bytes, dtype = _size(tensor)
            shape = tensor.place.shape if dtype is None else (*tensor.place.shape[:-1], dtype[1])
            numpy_type = np.dtype(np.uint8) if dtype else np.dtype(np.float32 if tensor.kind == "f32" else np.float16)
            raw = gguf.GGMLQuantizationType[tensor.kind.upper()]
            writer.add_tensor_info(tensor.key, shape, numpy_type, data_bytes, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for value in _values(config, tensors):
            writer.write_tensor_data(value)
        writer.close()
        replace_file(partial, target)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)
    return target


def _kind_of(key: str, place: TensorPlace, kind: str) -> str:
    """Norms and biases in fp32, matrices in the wanted type or the next one that their rows divide into."""
    if len(place.shape) < 2:
        return "f32"
    wanted = "q6_k" if kind == "q4_k" and key in ENDS else kind
    for choice in (wanted, "q8_0", "f16"):
        if choice == "f16" or (wanted != "f16" and place.shape[-1] % packed_format(choice).block == 0):
            return choice
    raise AssertionError("f16 always does")


def _size(tensor: _Tensor) -> tuple[int, tuple[str, int] | None]:
    """(bytes, (format, bytes of a row) where it is packed)."""
    if tensor.kind in ("f32", "f16"):
        numel = int(np.prod(tensor.place.shape))
        return numel * (4 if tensor.kind == "f32" else 2), None
    row_bytes = packed_format(tensor.kind).row_bytes(tensor.place.shape[-1])
    return row_bytes * int(np.prod(tensor.place.shape[:-1])), (tensor.kind, row_bytes)


def _values(config: Any, tensors: list[_Tensor]) -> Iterator[np.ndarray]:
    for tensor in tensors:
        value = tensor.place.read()
        if (order := row_order(config, tensor.name, to_file=True)) is not None:
            value = value[order]
        if tensor.kind in ("f32", "f16"):
            yield value.to(torch.float32 if tensor.kind == "f32" else torch.float16).numpy()
        else:
            spec = PackedSpec(packed_format(tensor.kind), tuple(value.shape))
            (blocks,) = spec.planes(spec.pack(value))
            yield blocks.reshape(*value.shape[:-1], -1).numpy()


def add_sizes(writer: Any, config: Any, name: str) -> None:
    """The model's name and sizes, as llama.cpp and we read them from the header."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)


def _add_facts(writer: Any, config: Any, kind: str, folder: Path) -> None:
    import gguf

    add_sizes(writer, config, folder.name)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, folder, config.vocab_size)
    _add_end_tokens(writer, folder)


def _add_end_tokens(writer: Any, folder: Path) -> None:
    """Write the tokens that end an answer beside the tokenizer's EOS: such a file has two more places for them."""
    file = folder / "generation_config.json"
    ends = end_ids(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")) if file.is_file() else []
    own = writer.kv_data[0].get("tokenizer.ggml.eos_token_id")
    others = [token for token in ends if own is None or token != own.value]
    for add, token in zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False):
        add(token)
