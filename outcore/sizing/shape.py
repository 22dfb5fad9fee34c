"""Shape of a model, from which sizes follow: parameter counts by part, and the widths that set activations and FLOPs.

`shape_from_fields` counts from a configuration's fields alone (no torch, microseconds); `outcore.model.shape` counts
any other model on the meta device. tests/plan/test_shape.py holds both against each other and hand-worked numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from outcore.sizing.states import packed_size

Blocks = tuple[tuple[int, tuple[int, ...]], ...]
"""(how many in a row, the numbers of each) of blocks of a model in its order: a layer, or what lies beside them."""


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
    tensors: Blocks
    """Elements of each parameter."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    """Intermediate width that one token goes through; top-k times the expert's in a mixture of experts."""
    gated_ffn: bool = True
    experts_per_token: int = 0
    """0: dense."""
    num_experts: int = 0
    """Experts of a layer that has any, shared ones not counted."""
    expert_params: tuple[int, ...] = ()
    """Elements of them together in each layer. (): dense."""
    fused_attention: bool = True
    """False: attention scores [B, heads, T, T] exist in memory."""
    caps_logits: bool = False
    """Whether its head soft-caps the logits: three operations more over all of them."""
    tied: bool = False
    tied_numels: tuple[int, ...] = ()
    """Elements of each weight that the constructor makes and then ties away; not in the other counts."""
    is_encoder_decoder: bool = False
    max_positions: int | None = None
    short_positions: int | None = None
    """Positions up to which it takes its short rotary factors, where it has two sets."""
    adapters: Blocks = ()
    """(in, out) of each linear layer that adapters go on, in turn: rank r trains a matrix of r times either."""
    lora_targets: tuple[str, ...] = ()
    """Names of the modules that `adapters` are on. (): every linear layer but the head."""
    lora_r: int = 0
    """Rank of the adapters; 0: all weights train."""
    use_dora: bool = False
    """The adapters have lengths beside them."""
    modules_to_save: tuple[str, ...] = ()
    """Names of the modules that are trained whole beside the adapters."""
    lengths: Blocks = ()
    """Elements of DoRA's lengths beside the adapters."""
    whole: Blocks = ()
    """Elements of the base's parameters that are trained whole beside the adapters."""
    whole_in_ends: int = 0
    """Elements of them in embedding and head."""
    seeing_params: int = 0
    """Elements of towers and projectors; all other figures are of the text model between them."""
    matrices: Blocks = ()
    """(elements, columns) of each matrix of the layers that a packed base packs, in turn."""
    quantize: str = ""
    """Format that the frozen base is packed in at home; '': 16 or 32 bits."""
    is_published_packed: bool = False
    """The checkpoint has that format, so no flag asks for it."""
    packed_ends: tuple[str, str] = ("", "")
    """Formats that the matrices of embedding and head are packed in, as published; '': 16 or 32 bits."""
    windows: tuple[tuple[int | None, int], ...] = ()
    """(tokens that a token sees, itself included; layers that are so); None: all before it. (): all layers see all."""
    stays_eager: bool = False
    """Layers have dropout, or routers a balancing loss: the streaming engine neither compiles nor captures them."""
    states: tuple[int, int] | None = (0, 0)
    """Numbers of a sequence's recurrent states, (in the model's type, in fp32); None: not known."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_params)

    @property
    def layer_matrices(self) -> list[tuple[int, int]]:
        """(in, out) of each weight of the layers that Muon updates: linear layers, experts in one tensor apart."""
        return [
            pair
            for times, block in self.adapters
            for pair in zip(block[::2], block[1::2], strict=True)
            for _ in range(times)
        ]

    @property
    def base_params(self) -> int:
        """Parameters of the model without adapters."""
        return self.embedding_params + sum(self.layer_params) + self.head_params

    @property
    def lora_dims(self) -> int:
        """Numbers that adapters of rank 1 have."""
        return _elements(self.adapters)

    @property
    def adapter_params(self) -> int:
        """Parameters beside the base's."""
        return self.lora_r * self.lora_dims + (_elements(self.lengths) if self.lora_r else 0)

    @property
    def total_params(self) -> int:
        return self.base_params + self.adapter_params

    @property
    def trainable_params(self) -> int:
        return self.adapter_params + _elements(self.whole) if self.lora_r else self.base_params

    def saved_bytes(self, element_bytes: int) -> int:
        """Bytes less that the base takes at home because it is packed."""
        if not self.quantize:
            return 0
        size = packed_size(self.quantize)
        return sum(
            times * (numel * element_bytes - size.of(numel))
            for times, block in self.matrices
            for numel, columns in zip(block[::2], block[1::2], strict=True)
            if columns % size.block == 0
        )

    def layer_saved_bytes(self, element_bytes: int) -> int:
        """Bytes less of one layer, on average."""
        return self.saved_bytes(element_bytes) // self.num_layers

    @property
    def head_weight_numel(self) -> int:
        """Elements of the output head's matrix, tied or not."""
        return self.vocab_size * self.hidden_size

    @property
    def largest_layer_weight_numel(self) -> int:
        """Elements of the largest weight that a layer has; of any, where layers share weights."""
        in_layers = set(self.layer_params)
        found = [max(block) for _, block in self.tensors if sum(block) in in_layers]
        return max(found, default=self.largest_weight_numel)

    @property
    def ends_params(self) -> int:
        """The larger of embedding and head, as they are streamed."""
        return max(self.embedding_params, self.head_params + (self.head_weight_numel if self.tied else 0))

    @property
    def is_moe(self) -> bool:
        return self.experts_per_token > 0

    def with_lora(self, rank: int) -> ModelShape:
        """Shape of this model with `adapters` of this rank. ValueError without any."""
        if rank < 1:
            raise ValueError(f"lora_r is {rank}, but the rank of adapters must be at least 1 (8 to 64 is usual).")
        if self.lora_dims == 0:
            raise ValueError(
                f"{self.name} has no linear layers that LoRA adapters could go on: plan it without lora_r."
            )
        return dataclasses.replace(self, lora_r=rank)

    def packed(self, quantize: str | None, *, published: str | None = None) -> ModelShape:
        """Shape of this model with a frozen base in this format (none: as it is). `published`: the format that the
        checkpoint has, which it keeps. ValueError where nothing packs."""
        quantize = published or ("" if quantize in (None, "none") else quantize)
        shape = dataclasses.replace(self, quantize=quantize, is_published_packed=bool(published))
        if shape.quantize and not shape.saved_bytes(2):
            raise ValueError(f"quantize {quantize}: no matrix of {self.name} divides into its blocks. Leave it out.")
        return shape


def _elements(blocks: Blocks) -> int:
    return sum(times * sum(block) for times, block in blocks)


def in_blocks(blocks: Sequence[Sequence[int]]) -> Blocks:
    """Equal ones that follow one another become one; empty ones vanish."""
    return tuple((len(list(equal)), block) for block, equal in groupby(map(tuple, blocks)) if block)


DROPOUTS = (
    *("attn_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout", "residual_dropout", "resid_dropout"),
    *("activation_dropout", "dropout", "dropout_rate"),
)
"""Names of the dropout of layers in configurations. The engine itself tries the layers (`draws_random_numbers`)."""


COUNTED = ("llama", "qwen3", "qwen3_moe")
"""Architectures that `shape_from_fields` counts."""


def stays_eager(fields: Mapping[str, Any]) -> bool:
    """`ModelShape.stays_eager` by a configuration's fields."""
    balances = bool(fields.get("output_router_logits") and fields.get("router_aux_loss_coef"))
    return balances or any((fields.get(name) or 0.0) > 0 for name in DROPOUTS)


def shape_from_fields(name: str, model_type: str, f: Mapping[str, Any]) -> ModelShape:
    """Count a decoder of `COUNTED` from its configuration's fields, which must all be there."""
    if model_type not in COUNTED:
        raise ValueError(f"the planner does not count {model_type} by hand: it is counted on the meta device")
    hidden, layers, vocab, ffn = f["hidden_size"], f["num_hidden_layers"], f["vocab_size"], f["intermediate_size"]
    heads, kv_heads = f["num_attention_heads"], f["num_key_value_heads"]
    head_dim = f.get("head_dim") or hidden // heads
    q_dim, kv_dim = heads * head_dim, kv_heads * head_dim
    tensors = [hidden * q_dim, hidden * kv_dim, hidden * kv_dim, q_dim * hidden]
    tensors += [head_dim] * 2 if model_type.startswith("qwen3") else []  # Qwen3 norms each head of q and k
    adapters = [hidden, q_dim, hidden, kv_dim, hidden, kv_dim, q_dim, hidden]
    experts_in: list[int] = []
    inactive = top_k = experts = in_experts = 0
    if model_type == "qwen3_moe":
        experts, top_k, width = f["num_experts"], f["num_experts_per_tok"], f["moe_intermediate_size"]
        inactive, in_experts = (experts - top_k) * 3 * hidden * width, experts * 3 * hidden * width
        tensors += [experts * 2 * hidden * width, experts * hidden * width, hidden * experts]  # gate and up are one
        ffn = top_k * width
        experts_in = [experts * 2 * hidden * width, hidden, experts * hidden * width, width]
    else:
        tensors += [hidden * ffn] * 3
        adapters += [hidden, ffn, hidden, ffn, ffn, hidden]
    matrices = [n for inner, outer in zip(adapters[::2], adapters[1::2], strict=True) for n in (inner * outer, inner)]
    tensors += [hidden, hidden]
    layer, tied = sum(tensors), bool(f["tie_word_embeddings"])
    return ModelShape(
        name=name,
        model_type=model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        embedding_params=vocab * hidden,
        layer_params=(layer,) * layers,
        head_params=hidden + (0 if tied else vocab * hidden),
        active_layer_params=(layer - inactive) * layers,
        largest_weight_numel=max(vocab * hidden, *tensors),
        tensors=in_blocks([[vocab * hidden], *[tensors] * layers, [hidden] if tied else [hidden, vocab * hidden]]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_width=ffn,
        experts_per_token=top_k,
        num_experts=experts,
        expert_params=(in_experts,) * layers if experts else (),
        tied=tied,
        tied_numels=(vocab * hidden,) if tied else (),
        max_positions=f["max_position_embeddings"],
        adapters=in_blocks([adapters] * layers),
        matrices=in_blocks([[*matrices, *experts_in]] * layers),
        stays_eager=stays_eager(f),
    )
