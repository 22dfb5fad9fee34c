"""A model's config made tiny: same architecture and layer kinds, a few thousand parameters, so that it can be tried.

Widths, counts of heads and experts, windows and the vocabulary shrink; what decides the code path (activation,
normalisation, scaling, soft-capping, kinds of layers, shared or untied weights) stays.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

HEADS, HEAD_DIM, WINDOW, VOCAB, POSITIONS = 4, 16, 8, 128, 64
HIDDEN = HEADS * HEAD_DIM
MAX_LAYERS = 8

_FIXED = {
    "intermediate_size": 96,
    "ffn_dim": 96,
    "dff": 96,
    "n_inner": 96,
    "d_ff": 96,
    "d_kv": HEAD_DIM,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "word_embed_proj_dim": HIDDEN,
    "head_dim": HEAD_DIM,
    "rotary_dim": HEAD_DIM // 2,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "window_size": WINDOW,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": HEAD_DIM,
    "max_position_embeddings": POSITIONS,
}
"""Replaced where the config has a whole number there (null keeps its meaning: absent)."""

_AT_MOST = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_top_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_layers": 2,
    "num_decoder_layers": 2,
}

_KV_HEADS = ("num_key_value_heads", "num_kv_heads")


def shrink_config(config: Any) -> Any:
    """A tiny copy of a transformers config. The original is left alone."""
    tiny = copy.deepcopy(config)
    text = tiny.get_text_config(decoder=True)
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and not getattr(text, "is_encoder_decoder", False):
        _shrink_layers(text, layers)
    heads = getattr(text, "num_attention_heads", None)
    if isinstance(heads, int):
        text.num_attention_heads = HEADS
        for name in _KV_HEADS:
            if type(kv_heads := getattr(text, name, None)) is int:
                _set(text, name, HEADS if kv_heads == heads else (1 if kv_heads == 1 else 2))
    if isinstance(getattr(text, "hidden_size", None), int):
        text.hidden_size = HIDDEN
    for name, value in _FIXED.items():
        if type(getattr(text, name, None)) is int:
            _set(text, name, value)
    if type(getattr(text, "qk_rope_head_dim", None)) is int:  # multi-head latent attention: rotary part of each head
        _set(text, "head_dim", _FIXED["qk_rope_head_dim"])
    for name, most in _AT_MOST.items():
        if type(getattr(text, name, None)) is int:
            setattr(text, name, min(most, getattr(text, name)))
    _shrink_rope(text)
    text.vocab_size = VOCAB
    for name in ("bos_token_id", "eos_token_id"):
        setattr(text, name, 1)
    text.pad_token_id = 0 if getattr(text, "is_encoder_decoder", False) else None
    return tiny


def _set(config: Any, name: str, value: Any) -> None:
    """Set a field; one that the config computes from others (a property) follows by itself."""
    with suppress(AttributeError):
        setattr(config, name, value)


def _shrink_layers(text: Any, layers: int) -> None:
    """The shortest stack with every kind of layer, at least two; per-layer lists are cut to the same length."""
    types = getattr(text, "layer_types", None)
    wanted = 2
    if isinstance(types, (list, tuple)) and len(types) == layers:
        wanted = max(wanted, 1 + max(list(types).index(kind) for kind in set(types)))
    wanted = min(layers, wanted, MAX_LAYERS)
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == layers and layers > wanted:
            setattr(text, name, type(value)(value[:wanted]))
    text.num_hidden_layers = wanted


def _shrink_rope(text: Any) -> None:
    """Plain rotary frequencies: scaled ones carry tables sized for the real head."""
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        return

    def plain(parameters: dict[str, Any]) -> dict[str, Any]:
        kept = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
        return {"rope_type": "default", "rope_theta": 10000.0, **kept}

    nested = rope and all(isinstance(value, dict) for value in rope.values())
    text.rope_parameters = {key: plain(value) for key, value in rope.items()} if nested else plain(rope)
