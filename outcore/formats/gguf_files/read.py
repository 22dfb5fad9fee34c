"""A GGUF file as a packed checkpoint: its blocks stay as they are, under the model's names.

How llama.cpp names and keeps the weights of each architecture that is known here.

Names come from the `gguf` package's own table. Its converter turns the rows of Llama's query and key projections from
half-split to interleaved rotary order; everything else of these architectures is kept as it is.

A byte-level BPE tokenizer in the words of a GGUF file."""

from __future__ import annotations

import json
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
from outcore.formats.ggml import packed_format
from outcore.formats.packed import PackedSpec
from outcore.model.facts import GgufTensor, gguf_header

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""transformers' model_type -> architecture of the file."""
ONLY_READ = ("qwen3_moe",)
INTERLEAVED = ("llama",)
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


class GgufRefused(ValueError):
    """Why this model cannot be written to, or read from, a GGUF file."""


def architecture_of(config: Any, *, to_file: bool) -> str:
    """GgufRefused naming the architectures that are known."""
    known = [name for name in ARCHITECTURES if not (to_file and name in ONLY_READ)]
    if config.model_type not in known:
        raise GgufRefused(
            f"GGUF files are {'written' if to_file else 'read'} for {', '.join(known)}, not for {config.model_type}. "
            + ("Convert the exported folder with llama.cpp's convert_hf_to_gguf.py" if to_file else "Take safetensors")
            + " instead"
        )
    scaling = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise GgufRefused(f"its positions are scaled ({kind}), which is not written to or read from GGUF files here")
    return ARCHITECTURES[config.model_type]


def rope_theta(config: Any) -> float:
    """The base of rotary frequencies."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta", getattr(config, "rope_theta", None) or 10000.0))


def gguf_names(config: Any, names: list[str], *, to_file: bool) -> dict[str, tuple[str, ...]]:
    """The file's name of each parameter; of stacked experts' gate and up, which are two tensors there, both.

    GgufRefused for a parameter that llama.cpp has no name for."""
    import gguf

    architecture = architecture_of(config, to_file=to_file)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found = {}
    for name in names:
        # Stacked experts are parameters themselves; all others are a module's weight or bias.
        stem, suffix = (name, "weight") if name.endswith(EXPERTS) else name.rsplit(".", 1)
        stems = [stem.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj")]
        known = [table.get_name(one) for one in (stems if stem.endswith(EXPERTS[0]) else [stem])]
        if None in known:
            raise GgufRefused(f"llama.cpp's {architecture} has no place for {name}")
        found[name] = tuple(f"{one}.{suffix}" for one in known)
    return found


def row_order(config: Any, name: str, *, to_file: bool) -> torch.Tensor | None:
    """The rows of a parameter in the order of the file (or of the model); None where both are the same."""
    leaf = name.split(".")[-2] if "." in name else ""
    if ARCHITECTURES[config.model_type] not in INTERLEAVED or leaf not in ("q_proj", "k_proj"):
        return None
    heads = config.num_attention_heads if leaf == "q_proj" else config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (heads, 2, head_dim // 2) if to_file else (heads, head_dim // 2, 2)
    return torch.arange(heads * head_dim).view(shape).transpose(1, 2).reshape(-1)


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


def add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Write the folder's tokenizer.json. GgufRefused for other kinds than byte-level BPE."""
    import gguf

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise GgufRefused(f"{folder} has no tokenizer.json, and a GGUF file carries its tokenizer")
    described = json.loads(path.read_text(encoding="utf-8"))
    model = described["model"]
    parts = _flat(described.get("pre_tokenizer"))
    if model["type"] != "BPE" or all(part["type"] != "ByteLevel" for part in parts):
        raise GgufRefused(f"its tokenizer is {model['type']}; only byte-level BPE is written to GGUF files here")
    added = {token["id"]: token for token in described.get("added_tokens", [])}
    by_id = {number: token for token, number in model["vocab"].items()}
    by_id |= {number: token["content"] for number, token in added.items()}
    tokens, types = [], []
    for number in range(max(vocab_size, max(by_id) + 1)):
        tokens.append(by_id.get(number, f"[PAD{number}]"))
        if number not in by_id:
            types.append(gguf.TokenType.UNUSED)
        elif number in added:
            types.append(gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED)
        else:
            types.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting(parts))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_token_merges(merges)
    gguf.SpecialVocab(folder, load_merges=False, n_vocab=len(tokens)).add_to_gguf(writer, quiet=True)


def _flat(described: Any) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer."""
    if described is None:
        return []
    return described["pretokenizers"] if described["type"] == "Sequence" else [described]


def _splitting(parts: list[dict[str, Any]]) -> str:
    """llama.cpp's name for how text is split before merging. GgufRefused for a way that it has no name for here."""
    patterns = [str(part.get("pattern", {}).get("Regex", "")) for part in parts if part["type"] == "Split"]
    if any(part["type"] == "Digits" and part.get("individual_digits") for part in parts) and not patterns:
        return "smollm"
    if not patterns:
        return "gpt-2"
    if len(patterns) == 1 and "(?i:" in patterns[0]:
        return "llama-bpe" if r"\p{N}{1,3}" in patterns[0] else "qwen2"
    raise GgufRefused(f"its tokenizer splits text in a way that has no name here: {patterns[0][:60]}")
