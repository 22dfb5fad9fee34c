"""What the planner knows of a model: parameter counts by streaming unit and the widths that set activations and FLOPs.

`preset_shape` counts from a preset's fields alone (no torch, microseconds); `outcore.plan.shape_source` counts any
other model on the meta device. tests/test_plan_shape.py holds both against each other and against hand-worked numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Counts are of elements, never bytes; tied parameters are counted once, in the embedding."""

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    embedding_params: int
    """Everything before the layers: token embedding, learned positions."""
    layer_params: tuple[int, ...]
    """Per layer; encoder and decoder layers of an encoder-decoder one after the other."""
    head_params: int
    """Everything after the layers: final norm, untied output head."""
    active_layer_params: int
    """Sum over layers of the parameters that one token meets: all but the experts it is not sent to."""
    largest_weight_numel: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    """Intermediate width that one token goes through; top-k times the expert's in a mixture of experts."""
    gated_ffn: bool = True
    experts_per_token: int = 0
    """0: dense."""
    fused_attention: bool = True
    """False: attention scores [B, heads, T, T] exist in memory."""
    tied: bool = False
    tied_numels: tuple[int, ...] = ()
    """Elements of each weight that the constructor makes and then ties away; not in the other counts."""
    is_encoder_decoder: bool = False
    max_positions: int | None = None
    lora_dims: int = 0
    """Sum of (in + out) over the linear layers that adapters go on: rank r trains r times as many numbers."""
    lora_r: int = 0
    """Rank of the adapters; 0: all weights train."""
    stays_eager: bool = False
    """Layers have dropout, or routers a balancing loss: the streaming engine neither compiles nor captures them."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_params)

    @property
    def base_params(self) -> int:
        """Parameters of the model without adapters."""
        return self.embedding_params + sum(self.layer_params) + self.head_params

    @property
    def adapter_params(self) -> int:
        return self.lora_r * self.lora_dims

    @property
    def total_params(self) -> int:
        return self.base_params + self.adapter_params

    @property
    def trainable_params(self) -> int:
        return self.adapter_params if self.lora_r else self.base_params

    @property
    def head_weight_numel(self) -> int:
        """Elements of the output head's matrix, tied or not."""
        return self.vocab_size * self.hidden_size

    @property
    def largest_unit_params(self) -> int:
        """Of the units that are streamed: embedding, each layer, head (tied: its weight streams a second time)."""
        return max(self.ends_params, max(self.layer_params) + -(-self.adapter_params // self.num_layers))

    @property
    def ends_params(self) -> int:
        """The larger of embedding and head, as they are streamed."""
        return max(self.embedding_params, self.head_params + (self.head_weight_numel if self.tied else 0))

    @property
    def is_moe(self) -> bool:
        return self.experts_per_token > 0

    def with_lora(self, rank: int) -> ModelShape:
        """The same model with adapters of this rank on every linear layer but the head. ValueError without any."""
        if rank < 1:
            raise ValueError(f"lora_r is {rank}, but the rank of adapters must be at least 1 (8 to 64 is usual).")
        if self.lora_dims == 0:
            raise ValueError(
                f"{self.name} has no linear layers that LoRA adapters could go on: plan it without lora_r."
            )
        return dataclasses.replace(self, lora_r=rank)


def preset_shape(name: str) -> ModelShape:
    """The shape of a preset by its name; ValueError with the nearest names when there is none."""
    from outcore.model.presets import check_preset_name

    preset = check_preset_name(name)
    return shape_from_fields(name, preset.model_type, preset.fields)


DROPOUTS = (
    *("attn_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout", "residual_dropout", "resid_dropout"),
    *("activation_dropout", "dropout", "dropout_rate"),
)
"""What configurations call the dropout of layers. The engine itself tries the layers (`draws_random_numbers`)."""


def stays_eager(fields: Mapping[str, Any]) -> bool:
    """`ModelShape.stays_eager` by a configuration's fields."""
    balances = bool(fields.get("output_router_logits") and fields.get("router_aux_loss_coef"))
    return balances or any((fields.get(name) or 0.0) > 0 for name in DROPOUTS)


def can_count(model_type: str) -> bool:
    """Whether `shape_from_fields` knows this architecture."""
    return model_type in ("llama", "qwen3", "qwen3_moe", "gpt2", "t5")


def shape_from_fields(name: str, model_type: str, fields: Mapping[str, Any]) -> ModelShape:
    """Count from config fields. All fields must be there (GPT-2 alone may use its published defaults)."""
    if model_type == "gpt2":
        return _gpt2(name, fields)
    if model_type == "t5":
        return _t5(name, fields)
    if model_type in ("llama", "qwen3", "qwen3_moe"):
        return _decoder(name, model_type, fields)
    raise ValueError(f"the planner does not count {model_type} by hand: it is counted on the meta device")


def _decoder(name: str, model_type: str, f: Mapping[str, Any]) -> ModelShape:
    hidden, layers, vocab, ffn = f["hidden_size"], f["num_hidden_layers"], f["vocab_size"], f["intermediate_size"]
    heads, kv_heads = f["num_attention_heads"], f["num_key_value_heads"]
    head_dim = f.get("head_dim") or hidden // heads
    q_dim, kv_dim = heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * q_dim + 2 * hidden * kv_dim  # q and o, k and v
    norms = 2 * hidden + (2 * head_dim if model_type.startswith("qwen3") else 0)  # Qwen3 norms each head of q and k
    lora_per_layer = 2 * (hidden + q_dim) + 2 * (hidden + kv_dim)
    largest = max(vocab * hidden, hidden * q_dim)
    top_k = 0
    if model_type == "qwen3_moe":
        experts, top_k, width = f["num_experts"], f["num_experts_per_tok"], f["moe_intermediate_size"]
        expert = 3 * hidden * width
        layer = attention + norms + hidden * experts + experts * expert
        active = layer - (experts - top_k) * expert
        largest = max(largest, experts * 2 * hidden * width)  # gate and up of all experts are one tensor
        ffn = top_k * width
        # peft adapts the router, and fused expert weights at rank * experts (gate and up together: twice that)
        lora_per_layer += hidden + experts + 2 * experts * (hidden + 2 * width) + experts * (width + hidden)
    else:
        layer = active = attention + norms + 3 * hidden * ffn
        lora_per_layer += 3 * (hidden + ffn)
        largest = max(largest, hidden * ffn)
    tied = bool(f["tie_word_embeddings"])
    return ModelShape(
        name=name,
        model_type=model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        embedding_params=vocab * hidden,
        layer_params=(layer,) * layers,
        head_params=hidden + (0 if tied else vocab * hidden),
        active_layer_params=active * layers,
        largest_weight_numel=largest,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_width=ffn,
        experts_per_token=top_k,
        tied=tied,
        tied_numels=(vocab * hidden,) if tied else (),
        max_positions=f["max_position_embeddings"],
        lora_dims=lora_per_layer * layers,
        stays_eager=stays_eager(f),
    )


def _gpt2(name: str, f: Mapping[str, Any]) -> ModelShape:
    hidden, layers = f.get("n_embd", 768), f.get("n_layer", 12)
    vocab, positions, heads = f.get("vocab_size", 50257), f.get("n_positions", 1024), f.get("n_head", 12)
    layer = 12 * hidden * hidden + 13 * hidden
    return ModelShape(
        name=name,
        model_type="gpt2",
        hidden_size=hidden,
        vocab_size=vocab,
        embedding_params=(vocab + positions) * hidden,
        layer_params=(layer,) * layers,
        head_params=2 * hidden,
        active_layer_params=layer * layers,
        largest_weight_numel=max(vocab * hidden, 4 * hidden * hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_width=4 * hidden,
        gated_ffn=False,
        tied=True,
        tied_numels=(vocab * hidden,),
        max_positions=positions,
        lora_dims=(4 * hidden + 2 * hidden + 5 * hidden + 5 * hidden) * layers,
        stays_eager=stays_eager({"attn_pdrop": 0.1, "resid_pdrop": 0.1, **f}),
    )


def _t5(name: str, f: Mapping[str, Any]) -> ModelShape:
    hidden, layers, heads, ffn = f["d_model"], f["num_layers"], f["num_heads"], f["d_ff"]
    inner, vocab = heads * f["d_kv"], f["vocab_size"]
    buckets = 32 * heads  # relative positions, in the first layer of each stack
    encoder = 4 * hidden * inner + 2 * hidden * ffn + 2 * hidden
    decoder = 8 * hidden * inner + 2 * hidden * ffn + 3 * hidden
    stack = (encoder + buckets, *[encoder] * (layers - 1), decoder + buckets, *[decoder] * (layers - 1))
    return ModelShape(
        name=name,
        model_type="t5",
        hidden_size=hidden,
        vocab_size=vocab,
        embedding_params=vocab * hidden,
        layer_params=stack,
        head_params=2 * hidden,
        active_layer_params=sum(stack),
        largest_weight_numel=max(vocab * hidden, hidden * ffn),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=f["d_kv"],
        ffn_width=ffn,
        gated_ffn=False,
        tied=True,
        tied_numels=(vocab * hidden,) * 3,  # of encoder, decoder and head: all are the shared embedding in the end
        is_encoder_decoder=True,
        lora_dims=layers * (12 * (hidden + inner) + 4 * (hidden + ffn)),
        stays_eager=stays_eager({"dropout_rate": 0.1, **f}),
    )
