"""A model's config made tiny: same architecture and layer kinds, a few thousand parameters, so that it can be tried.

Widths, counts of heads and experts, windows and the vocabulary shrink; what decides the code path (activation,
normalisation, scaling, soft-capping, kinds of layers, shared or untied weights) stays. Sizes that must agree (heads
and their width, a state-space mixer and its expansion, parts of a latent head) agree afterwards. Nested configs of
other parts (a vision tower) are made tiny, too.

Do the data's token ids fit the model's embedding table? Asked before training: a GPU answers by aborting."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

from torch import nn

HEADS, HEAD_DIM, WINDOW, VOCAB, POSITIONS = 4, 16, 8, 128, 64
HIDDEN = HEADS * HEAD_DIM
MAX_LAYERS = 8
MAX_KINDS = 6
"""Different values in a per-layer list that names kinds of layers."""

_FIXED = {
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "decoder_attention_heads": HEADS,
    "encoder_attention_heads": HEADS,
    "dff": 96,
    "n_inner": 96,
    "d_ff": 96,
    "d_kv": HEAD_DIM,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "word_embed_proj_dim": HIDDEN,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "head_dim": HEAD_DIM,
    "rotary_dim": HEAD_DIM // 2,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "window_size": WINDOW,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": HEAD_DIM,
    "linear_head_dim": HEAD_DIM,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "max_position_embeddings": POSITIONS,
}
"""Replaced where the config has a whole number there, or one for each layer (null and 0 keep their meaning: absent)."""

_AT_MOST = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_top_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "num_layers": 2,
    "kv_n_heads": 2,
    "num_decoder_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "state_size": 16,
    "mamba_d_state": 16,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    "chunk_size": WINDOW,
    "mamba_chunk_size": WINDOW,
    "adapter_rank": 8,
    "linear_num_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

_TWINS = {"embedding_dim": "hidden_size", "lru_width": "hidden_size", "num_blocks": "num_hidden_layers"}
"""Second names that some configs hold beside the first, with the same number."""
_KEPT_OF_ROPE = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_MIXERS = [
    (expand, heads, width)
    for expand in ("expand", "mamba_expand")
    for heads in ("num_heads", "mamba_n_heads", "n_mamba_heads", "mamba_num_heads")
    for width in ("head_dim", "mamba_d_head", "mamba_headdim", "mamba_head_dim")
]
"""Names of a state-space mixer's expansion, heads and their width: heads x width = expansion x hidden size."""


def shrink_config(config: Any) -> Any:
    """A tiny copy of a transformers config. The original is left alone."""
    tiny = copy.deepcopy(config)
    text = tiny.get_text_config(decoder=True)
    for part in vars(tiny).values():
        if part is not text and hasattr(part, "get_text_config"):
            _shrink_part(part)
    _shrink_part(text)
    text.vocab_size = VOCAB
    for name in ("bos_token_id", "eos_token_id"):
        setattr(text, name, 1)
    pads = getattr(text, "pad_token_id", None) is not None
    text.pad_token_id = 0 if pads or text is not tiny or getattr(text, "is_encoder_decoder", False) else None
    text.use_cache = False
    return tiny


def _shrink_part(part: Any) -> None:
    overrides = _take_overrides(part)
    before = {name: getattr(part, name, None) for values in overrides.values() for name in values}
    twins = {
        twin: name
        for twin, name in _TWINS.items()
        if type(size := getattr(part, twin, None)) is int and size == getattr(part, name, None)
    }
    layers = getattr(part, "num_hidden_layers", None)
    if isinstance(layers, int) and not getattr(part, "is_encoder_decoder", False):
        kept = _shrink_layers(part, layers)
        overrides = {new: overrides[old] for new, old in enumerate(kept) if old in overrides}
    heads, hidden = getattr(part, "num_attention_heads", None), getattr(part, "hidden_size", None)
    latent = type(getattr(part, "qk_rope_head_dim", None)) is int
    widths: list[Any] = [getattr(part, name, None) for name in ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim")]
    whole_heads = latent and None not in widths and widths[0] == widths[1] + widths[2]
    mixers = [names for names in _MIXERS if _is_mixer(part, hidden, *names)]
    own_width = _own_width_of_mixer(part, hidden)
    if isinstance(heads, int):
        part.num_attention_heads = HEADS
        for name in _KV_HEADS:
            if type(kv_heads := getattr(part, name, None)) is int:
                _set(part, name, HEADS if kv_heads == heads else (1 if kv_heads == 1 else 2))
    if isinstance(hidden, int):
        part.hidden_size = HIDDEN
        if type(wide := getattr(part, "attention_hidden_size", None)) is int:
            _set(part, "attention_hidden_size", wide * HIDDEN // hidden)
    for name, value in _FIXED.items():
        old = getattr(part, name, None)
        if type(old) is int and old:
            _set(part, name, value)
        elif isinstance(old, (list, tuple)) and old and all(type(item) is int for item in old):
            _set(part, name, type(old)([value] * len(old)))
    if latent:  # multi-head latent attention: the rotary part of each head, or all of it
        _set(part, "head_dim", _FIXED["qk_rope_head_dim"] + (_FIXED["qk_nope_head_dim"] if whole_heads else 0))
    for name, most in _AT_MOST.items():
        if type(getattr(part, name, None)) is int:
            setattr(part, name, min(most, getattr(part, name)))
    if isinstance(rates := getattr(part, "compress_rates", None), dict):  # tokens that become one, by kind of layer
        part.compress_rates = {kind: min(rate, WINDOW) for kind, rate in rates.items()}
    for expand, num, width in mixers:
        setattr(part, num, getattr(part, expand) * HIDDEN // HEAD_DIM)
        setattr(part, width, HEAD_DIM)
    if own_width is not None:
        part.mamba_d_ssm, part.mamba_n_heads, part.mamba_d_head = own_width, own_width // HEAD_DIM, HEAD_DIM
    for twin, name in twins.items():
        _set(part, twin, getattr(part, name))
    _shrink_rope(part)
    if overrides:
        part.per_layer_config = {
            layer: {name: _as_much_smaller(part, name, value, before[name]) for name, value in values.items()}
            for layer, values in overrides.items()
        }


def _set(config: Any, name: str, value: Any) -> None:
    """Set a field; one that the config computes from others (a property) follows by itself or by its parts' fields."""
    with suppress(AttributeError, NotImplementedError):
        setattr(config, name, value)


def _is_mixer(part: Any, hidden: Any, *names: str) -> bool:
    expand, num, width = (getattr(part, name, None) for name in names)
    numbers = (hidden, expand, num, width)
    return all(type(number) is int for number in numbers) and num * width == expand * hidden  # pyright: ignore[reportOptionalOperand]


def _own_width_of_mixer(part: Any, hidden: Any) -> int | None:
    """A tiny mixer's width where the config tells it beside heads and expansion (Falcon-H1), in its proportion to the
    hidden size, of an even number of heads; None where it does not."""
    width = getattr(part, "mamba_d_ssm", None)
    if type(width) is not int or type(hidden) is not int:
        return None
    return 2 * HEAD_DIM * max(1, width * HIDDEN // hidden // (2 * HEAD_DIM))


def _take_overrides(part: Any) -> dict[int, dict[str, Any]]:
    """Take what single layers have otherwise (`per_layer_config`) out of the config: fields by layer."""
    if not getattr(part, "is_heterogeneous", False):
        return {}
    overrides = {int(layer): dict(values) for layer, values in part.to_dict()["per_layer_config"].items()}
    part.per_layer_config = None
    return overrides


def _as_much_smaller(part: Any, name: str, value: Any, before: Any) -> Any:
    """A layer's own size in the proportion to the common one that it had."""
    numbers = (value, before, now := getattr(part, name, None))
    if not all(type(number) is int and number > 0 for number in numbers):
        return value
    return max(1, value * now // before)  # pyright: ignore[reportOptionalOperand]


def _shrink_layers(part: Any, layers: int) -> list[int]:
    """The shortest stack with every kind of layer, at least two, and after them two of those that take keys and values
    of others; returns which layers are kept. Per-layer lists are cut likewise."""
    shared = getattr(part, "num_kv_shared_layers", None)
    shared = shared if type(shared) is int and 0 < shared < layers else 0
    own = layers - shared
    firsts = _first_of_each_kind(part, layers, own)
    near = max((first for first in firsts if first < MAX_LAYERS), default=0)
    mine = list(range(min(own, max(2, near + 1)))) + sorted(first for first in firsts if first >= MAX_LAYERS)
    kept = mine + list(range(own, layers))[:2]
    for name, value in _lists_of_layers(part, layers):
        if layers > len(kept):
            setattr(part, name, type(value)(value[i] for i in kept))
    _set(part, "num_hidden_layers", len(kept))
    if shared:
        part.num_kv_shared_layers = len(kept) - len(mine)
    return kept


def _lists_of_layers(part: Any, layers: int) -> list[tuple[str, Any]]:
    """Fields with a value for each layer."""
    return [(name, v) for name, v in vars(part).items() if isinstance(v, (list, tuple)) and len(v) == layers]


def _first_of_each_kind(part: Any, layers: int, own: int) -> set[int]:
    """The first layer of each kind that a per-layer list tells: by name (`layer_types`, `indexer_types`), by yes or no,
    or by one of a few numbers. Lists with a value of their own for most layers tell sizes, not kinds."""
    firsts: set[int] = set()
    computed = [name for name in dir(type(part)) if name.startswith("layer") and _is_property(part, name)]
    told = [value for _, value in _lists_of_layers(part, layers)] + [getattr(part, name) for name in computed]
    for value in told:
        if not isinstance(value, (list, tuple)) or len(value) != layers:
            continue
        if all(isinstance(item, (str, int, float)) for item in value) and len(set(value)) <= MAX_KINDS:
            firsts |= {list(value).index(kind) for kind in set(value[:own])}
    return firsts


def _is_property(part: Any, name: str) -> bool:
    return isinstance(getattr(type(part), name, None), property)


def _shrink_rope(part: Any) -> None:
    """Plain rotary frequencies where they are scaled, since scaled ones may carry tables sized for the real head. A
    type that is the model's own (axial ones of a vision tower) stays."""
    rope = getattr(part, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def plain(parameters: dict[str, Any]) -> dict[str, Any]:
        kind = parameters.get("rope_type", "default")
        kept = {key: parameters[key] for key in _KEPT_OF_ROPE if key in parameters}
        if "llama_4_scaling_beta" in kept:  # queries grow with every so many positions
            kept["original_max_position_embeddings"] = WINDOW
        return {"rope_type": "default" if kind in ROPE_INIT_FUNCTIONS else kind, "rope_theta": 10000.0, **kept}

    if any(isinstance(value, dict) for value in rope.values()):  # one for each kind of layer; None: no rotation there
        part.rope_parameters = {kind: plain(own) if isinstance(own, dict) else own for kind, own in rope.items()}
    else:
        part.rope_parameters = plain(rope)


def embedding_rows(model: nn.Module | None, config: Any | None) -> int | None:
    """Entries of the largest table that token ids can index, or None when the model tells nothing of it.

    A transformers config says it. Of an own module nothing is known but its matrices: whichever holds the tokens,
    it has no more rows than the tallest of them."""
    if config is not None:
        rows = getattr(config.get_text_config(decoder=True), "vocab_size", None)
        if isinstance(rows, int):
            return rows
    if model is None:
        return None
    return max((p.shape[0] for p in model.parameters() if p.ndim == 2), default=None)


def check_token_ids(max_token_id: int, rows: int | None) -> None:
    """ValueError when a token id of the data has no row in the embedding table."""
    if rows is None or max_token_id < rows:
        return
    raise ValueError(
        f"the data has token id {max_token_id}, but the model's embedding table has {rows} rows (ids 0 to {rows - 1}): "
        "the tokenizer and the model do not belong together. Use the tokenizer that comes with the model "
        "(--tokenizer_name_or_path), or make your own model's table as large as len(tokenizer)."
    )
