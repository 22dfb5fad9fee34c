"""Model: fields of the settings; each docstring is the text of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.config.spec import setting


@dataclass(frozen=True)
class ModelFields:
    """Model."""

    model_name_or_path: str | None = setting(None, aliases=("model", "base_model", "model_id"), common=True)
    """The model, which may also stand without a flag: a folder or GGUF file, a hub id, a config.json, or a preset's
    name (but gpt2 and t5-small, which the hub has)."""
    preset: str | None = setting(None, common=True)
    """Train from scratch with a built-in shape: tiny (the default), llama-1b, llama-8b, qwen3-8b, gpt2, t5-small ..."""
    config_file: str | None = None
    """Train from scratch with the shape of this Hugging Face config.json."""
    config_overrides: str | None = setting(None, mapping=True)
    """Fields of the model's config to change, as JSON: '{"num_hidden_layers": 4}'."""
    model_module: str | None = None
    """Your own model and loss: `my.py:build` (see docs/models.md)."""
    tokenizer_name_or_path: str | None = setting(None, aliases=("tokenizer", "tokenizer_name"))
    """Tokenizer, when it is not the model's own. From scratch the default is a byte-level BPE trained on the data."""
    trust_remote_code: bool = False
    """Run Python code that a hub repository ships. Off unless you ask for it."""
    attn_implementation: str = "auto"
    """Attention of transformers: auto (sdpa, or eager where a model lacks it), sdpa, eager, flash_attention_2."""
    train_vision: Literal["none", "lora", "full"] | None = None
    """Train an image-text model on rows with pictures; of its tower and projector: none, lora, or full."""
    router_loss: Literal["tokens", "micro_batch"] = "tokens"
    """Weight of a mixture's balancing loss: by each micro-batch's share of tokens, or whole for each micro-batch."""
    seq_length: int | None = setting(
        None,
        aliases=("max_seq_length", "max_length", "cutoff_len", "sequence_len", "model_max_length", "block_size"),
        above=0,
        common=True,
    )
    """Tokens per training row. Default: 256 for tiny, else the smaller of 1024 and what the model can take."""
