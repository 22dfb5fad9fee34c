"""A GGUF file of a preset's shape with random weights, for us and for llama.cpp: one random block again and again.

    python benchmarks/infer/random_gguf.py --model qwen3-32b --type q4_k --out /dev/shm/race.gguf

A mixture's router then chooses much the same experts for every token, because attention's mean outweighs what a token
brought along. `--spread`: embeddings 50 times as large, so that each token has its own, about evenly. A trained router,
which a loss has taught to use all experts, lies between; for this one caches can do least.

Types: bf16, q8_0, q4_0, q4_k; embedding and head of the latter two in q6_k. No vocabulary (llama.cpp's `no_vocab`): who
runs it feeds token ids. Positions are never scaled, for files of Llama 3.1 that we read have none. Written at the rate
of the folder; memory: the largest weight.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where outcore is not installed

from outcore.formats import packed_format
from outcore.formats.gguf_files import add_sizes
from outcore.model.presets import preset_config

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
BLOCK_NUMEL = 1 << 20
SPREAD = 50
"""Factor of the embeddings with --spread: as large as a layer's input is after its norm."""
TYPES = ("bf16", "q8_0", "q4_0", "q4_k")
Weight = tuple[str, tuple[int, ...], str]
"""(name, shape, type)."""


def weights_of(config: Any, kind: str) -> Iterator[Weight]:
    """Every weight of the file."""
    hidden, is_moe = config.hidden_size, config.model_type == "qwen3_moe"
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    rows, kv_rows = config.num_attention_heads * head, config.num_key_value_heads * head
    ends = "q6_k" if kind.startswith("q4") and hidden % 256 == 0 else kind
    yield "token_embd", (config.vocab_size, hidden), ends
    for n in range(config.num_hidden_layers):
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q": (rows, hidden),
            "attn_k": (kv_rows, hidden),
            "attn_v": (kv_rows, hidden),
            "attn_output": (hidden, rows),
            "ffn_norm": (hidden,),
        }
        if config.model_type.startswith("qwen3"):
            shapes |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
        many = (config.num_experts,) if is_moe else ()
        middle, suffix = (config.moe_intermediate_size, "_exps") if is_moe else (config.intermediate_size, "")
        if is_moe:
            shapes["ffn_gate_inp"] = (config.num_experts, hidden)
        shapes |= {f"ffn_{name}{suffix}": (*many, middle, hidden) for name in ("gate", "up")}
        shapes |= {f"ffn_down{suffix}": (*many, hidden, middle)}
        for name, shape in shapes.items():
            yield f"blk.{n}.{name}", shape, "f32" if len(shape) == 1 or name == "ffn_gate_inp" else kind
    yield "output_norm", (hidden,), "f32"
    if not config.tie_word_embeddings:
        yield "output", (config.vocab_size, hidden), ends


class Repeated:
    """Bytes of a weight: blocks of random values again and again, a number of them that divides no row."""

    def __init__(self) -> None:
        self._values = torch.randn(BLOCK_NUMEL, generator=torch.Generator().manual_seed(0)) * 0.02
        self._blocks: dict[tuple[str, int], np.ndarray] = {}
        self._made: dict[tuple[str, int, int], np.ndarray] = {}

    def row_bytes(self, shape: tuple[int, ...], kind: str) -> int:
        block, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
        if shape[-1] % block:
            raise ValueError(f"rows of {shape[-1]} do not divide into blocks of {block} ({kind})")
        return shape[-1] // block * size_bytes

    def of(self, shape: tuple[int, ...], kind: str, factor: int = 1) -> np.ndarray:
        """One weight, so many times as large; norms are ones, and a router has values of its own."""
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        if kind == "f32":
            return torch.randn(shape).numpy()
        size_bytes = int(np.prod(shape[:-1])) * self.row_bytes(shape, kind)
        if (kind, size_bytes, factor) not in self._made:
            self._made[kind, size_bytes, factor] = np.resize(self._block(kind, factor), size_bytes)
        return self._made[kind, size_bytes, factor].reshape(*shape[:-1], -1)

    def _block(self, kind: str, factor: int) -> np.ndarray:
        if (kind, factor) not in self._blocks:
            values = self._values * factor
            if kind.endswith("_k"):
                packing = packed_format(kind)
                (rows,) = packing.pack_blocks(values.view(-1, packing.block))
                packed = rows.numpy()
            else:
                flat = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind.upper()])
                block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][1]
                packed = flat.view(np.uint8).reshape(-1, block_bytes)
            # 4,093 and 32,749 are primes below the blocks there are: no row of a matrix comes again soon.
            self._blocks[kind, factor] = packed[: 4093 if len(packed) < 32749 else 32749].reshape(-1)
        return self._blocks[kind, factor]


def write_random(file: Path, model: str, kind: str, *, spreads: bool = False) -> dict[str, Any]:
    """Write the file unless it is there, and say what it took. OSError where the folder has no room."""
    config = preset_config(model)
    weights, values = list(weights_of(config, kind)), Repeated()
    sizes = [int(np.prod(shape[:-1])) * values.row_bytes(shape, its_kind) for _, shape, its_kind in weights]
    found = {"model": model, "type": kind, "spread": spreads, "gb": sum(sizes) / 1e9, "file": str(file)}
    if file.is_file() and file.stat().st_size > sum(sizes):
        return {**found, "write_s": 0.0}
    file.unlink(missing_ok=True)
    if shutil.disk_usage(file.parent).free < 1.05 * sum(sizes):
        raise OSError(f"{file.parent} has no room for {sum(sizes) / 1e9:.1f} GB")
    began = time.perf_counter()
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config.model_type])
    add_facts(writer, config, f"{model} {kind}")
    for (name, shape, its_kind), size_bytes in zip(weights, sizes, strict=True):
        stored = (*shape[:-1], values.row_bytes(shape, its_kind))
        raw = gguf.GGMLQuantizationType[its_kind.upper()]
        writer.add_tensor_info(f"{name}.weight", stored, np.dtype(np.uint8), size_bytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, its_kind in weights:
        writer.write_tensor_data(values.of(shape, its_kind, SPREAD if spreads and name == "token_embd" else 1))
    writer.close()
    return {**found, "write_s": time.perf_counter() - began}


def add_facts(writer: Any, config: Any, name: str) -> None:
    """The header that both sides read sizes from."""
    add_sizes(writer, config, name)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("no_vocab")


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--type", default="q8_0", choices=TYPES)
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    print(json.dumps(write_random(args.out, args.model, args.type, spreads=args.spread)))


if __name__ == "__main__":
    main()
