"""What `stream_exact.py` and `moments8.py` share: Llama shapes from scratch, and the built-in text as micro-batches.

The text is this Python's own standard library (some 3 M tokens of a BPE trained on it), packed into rows; validation
rows come from files that training never sees.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from outcore.data import BatchStream, DataSettings, EvalStream, PreparedData, load_or_train_tokenizer, prepare_data
from outcore.model import LoadedModel, LoraSettings, ModelSettings, load_model

SHAPES = {  # hidden size, layers, intermediate size, heads, key/value heads
    "small": (64, 2, 176, 4, 2),
    "100m": (1024, 8, 2816, 16, 4),
    "300m": (1024, 24, 2816, 16, 4),
}
"""Llama shapes, untied; with the vocabulary of the built-in text (8,192) 0.1, 107 and 287 M parameters but for small's
1 M of embeddings."""

Batch = dict[str, torch.Tensor]


class Text:
    """The built-in text in rows of `seq_length`, and the order in which a run sees them."""

    def __init__(
        self, seq_length: int, *, max_eval_rows: int, cache_dir: str, max_train_rows: int | None = None
    ) -> None:
        settings = DataSettings(
            seq_length=seq_length,
            max_eval_samples=max_eval_rows,
            max_train_samples=max_train_rows,
            packing="on",
            cache_dir=cache_dir,
        )
        self.tokenizer = load_or_train_tokenizer(settings, say=print)
        self.seq_length = seq_length
        self.data: PreparedData = prepare_data(settings, self.tokenizer, say=print)
        for line in self.data.summary.lines():
            print(line)

    def stream(self, rows: int, seed: int) -> BatchStream:
        """Endless micro-batches of `rows` rows."""
        return BatchStream(self.data.train, rows, seed=seed)

    def validation(self, rows: int) -> EvalStream:
        """The held-out rows, each once."""
        assert self.data.eval is not None
        return EvalStream(self.data.eval, rows)

    def facts(self) -> dict[str, Any]:
        """For the results: how much there is of what."""
        summary = self.data.summary
        return {
            "source": summary.source,
            "documents": summary.documents,
            "train_rows": summary.train_rows,
            "train_tokens": summary.train_tokens,
            "validation_rows": summary.eval_rows,
            "vocab_size": len(self.tokenizer),
        }


def model(shape: str, text: Text, precision: str, seed: int, lora: LoraSettings | None = None) -> LoadedModel:
    """The shape with its initial weights, on the CPU; the same seed gives the same weights in any precision."""
    hidden, layers, intermediate, heads, kv_heads = SHAPES[shape]
    settings = ModelSettings(
        preset="tiny",
        precision=precision,
        seq_length=text.seq_length,
        config_overrides={
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "intermediate_size": intermediate,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "tie_word_embeddings": False,
        },
        lora=lora,
        seed=seed,
    )
    return load_model(settings, tokenizer=text.tokenizer)


def num_targets(batches: list[Batch]) -> int:
    """Tokens of a global batch that count for the loss."""
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}", flush=True)
