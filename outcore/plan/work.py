"""What a micro-batch costs in memory and arithmetic: activations of a layer, logits, FLOPs. Shared by both engines.

Notation: T tokens of a micro-batch, h hidden width, q / kv widths of queries / keys, f feed-forward width that one
token goes through, e bytes of an element. Attention is fused (no T x T scores) unless the shape says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.plan import constants as k
from outcore.plan.request import RunRequest
from outcore.plan.shape import ModelShape


@dataclass(frozen=True)
class Flops:
    """Of one step on one GPU."""

    forward: float
    backward: float
    """Recomputation included."""
    attention_forward: float = 0.0
    attention_backward: float = 0.0
    """Scores and weighted values, counted as causal; not in the two above, since their kernels are slower."""

    @property
    def total(self) -> float:
        """Matrix products and attention."""
        return self.forward + self.backward + self.attention

    @property
    def attention(self) -> float:
        return self.attention_forward + self.attention_backward


def step_flops(shape: ModelShape, request: RunRequest, seq_length: int, tokens: int) -> Flops:
    """Arithmetic of a step over `tokens` tokens of this GPU.

    Forward: 2 FLOPs per active parameter and token, and causal attention 2 * seq * q per layer. Backward: twice that
    for full training, once with adapters only (no gradients of frozen weights); attention 2.5 times, because its
    kernels recompute the scores. Recomputation: the layers once more.
    """
    attention = tokens * 2.0 * seq_length * shape.num_heads * shape.head_dim * shape.num_layers
    active = shape.active_layer_params / max(1, sum(shape.layer_params))
    layers = 2 * (shape.active_layer_params + active * shape.adapter_params)
    head = 2 * shape.head_weight_numel
    gradient_passes = 1 if shape.lora_r else 2
    again = 1 if request.activation_checkpointing else 0
    return Flops(
        forward=tokens * float(layers + head),
        backward=tokens * float(gradient_passes * (layers + head) + again * layers),
        attention_forward=attention,
        attention_backward=(k.ATTENTION_BACKWARD + again) * attention,
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step that pass through the device's own memory beside the matrix products' operands."""

    forward: float
    backward: float
    """Recomputation, loss and the adding up of gradients included."""


def step_traffic(shape: ModelShape, request: RunRequest, micro_tokens: int, micro_batches: int) -> Traffic:
    """Of `micro_batches` micro-batches of `micro_tokens` tokens, with fused element-wise work.

    Per token and layer forward: 8h (norms, residuals), 4(q + kv) (rotation, attention's operands), 3f (gated) or 2f;
    backward three times that, recomputation included. Loss: LOSS_BYTES_PER_LOGIT. Gradients: each micro-batch (of the
    head: each chunk of the loss) is read and added to an fp32 sum, 10 B per trained parameter.
    """
    e, h, f = request.element_bytes, shape.hidden_size, shape.ffn_width
    heads = shape.num_heads + shape.num_kv_heads
    per_token = e * (8 * h + 4 * heads * shape.head_dim + (3 if shape.gated_ffn else 2) * f)
    layers = float(per_token * shape.num_layers * micro_tokens * micro_batches)
    passes = (2 if request.activation_checkpointing else 1) + 1
    logits = k.LOSS_BYTES_PER_LOGIT * shape.vocab_size * micro_tokens * micro_batches
    summed = 0.0
    if not shape.lora_r:
        chunks = -(-micro_tokens // chunk_tokens(shape, micro_tokens))
        layer_passes = micro_batches if micro_batches > 1 else 0
        summed = 10.0 * (sum(shape.layer_params) * layer_passes + shape.head_weight_numel * chunks * micro_batches)
    return Traffic(forward=layers, backward=passes * layers + logits + summed)


def chunk_tokens(shape: ModelShape, tokens: int, smaller: int = 1) -> int:
    """Tokens whose logits are alive at once."""
    return min(tokens, max(16, k.LOGITS_CHUNK_BYTES // smaller // (4 * max(shape.vocab_size, 1))))


def layer_activation_bytes(shape: ModelShape, request: RunRequest, seq_length: int, tokens: int) -> int:
    """What autograd keeps of one layer, and the gradients alive at the peak of its backward pass.

    Per token: two norms (fp32 copy, normed, output: 4h + 2eh each), the residual stream (2eh), queries before and after
    rotation, attention output twice (4eq), keys and values (3e kv), gated feed-forward (gate, its activation, up,
    product: 4ef; plain: 3ef), copies for experts (2eh each); in flight: 2ef + 2eh.
    """
    e, h, f = request.element_bytes, shape.hidden_size, shape.ffn_width
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    per_token = 2 * (4 * h + 2 * e * h) + 2 * e * h + e * (4 * q + 3 * kv)
    per_token += e * f * (4 if shape.gated_ffn else 3) + 2 * e * h * shape.experts_per_token
    per_token += 2 * e * (f + h)
    if not shape.fused_attention:
        per_token += shape.num_heads * seq_length * (e + 4)
    return tokens * per_token


def layer_backward_bytes(shape: ModelShape, request: RunRequest, seq_length: int, tokens: int) -> int:
    """Alive at the peak of an uncompiled dense layer's backward: where the gated product is taken apart.

    Per token: two norms (4h + 2eh each), rotated queries and attention's output (2eq), keys and values (2e kv), gate,
    its activation and up (3ef), and gradients of the product and of both its factors (3ef). What
    `layer_activation_bytes` has beyond that is not kept for the backward: residual stream, queries and keys before
    their rotation. Layers of other kinds: as that has them.
    """
    if not shape.gated_ffn or shape.is_moe or not shape.fused_attention:
        return layer_activation_bytes(shape, request, seq_length, tokens)
    e, h = request.element_bytes, shape.hidden_size
    width = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return tokens * (2 * (4 * h + 2 * e * h) + 2 * e * width + 6 * e * shape.ffn_width)


def compiled_activation_bytes(shape: ModelShape, request: RunRequest, seq_length: int, tokens: int) -> int:
    """Alive at the peak of a compiled layer's backward.

    Adapters add nothing that counts (outcore/flow/layers/adapters.py): in the code that torch 2.13's compiler makes
    for the CPU, what is alive of a layer of Llama, Qwen3, Gemma 2 or GPT-2 is within 1 % of that without them, or less.
    """
    return int(k.COMPILED_ACTIVATIONS * layer_activation_bytes(shape, request, seq_length, tokens))


def mlp_activation_bytes(shape: ModelShape, request: RunRequest, tokens: int) -> int:
    """Of `layer_activation_bytes`, the intermediates of the feed-forward part."""
    return tokens * request.element_bytes * shape.ffn_width * ((4 if shape.gated_ffn else 3) + 2)


def mask_bytes(shape: ModelShape, request: RunRequest, seq_length: int, tokens: int) -> int:
    """Of a micro-batch in which a row holds several documents: a boolean mask [rows, T, T], and the numbers that the
    attention kernel makes of it. 0 where rows are not packed, or the scores outweigh it."""
    if shape.is_encoder_decoder or not shape.fused_attention:
        return 0
    return tokens * seq_length * (1 + request.element_bytes)


def border_bytes(shape: ModelShape, tokens: int) -> int:
    """What the flash kernel's backward takes for packed rows beyond what it takes for rows of one document: an fp32
    gradient of the queries for 128 tokens of each of `tokens` / 256 documents (as many as borders are usually held
    for), and with grouped queries keys' and values' gradients for every head (outcore/model/packed/attention.py)."""
    width = shape.num_heads * shape.head_dim
    documents = 1 << max(4, (max(1, tokens // 256) - 1).bit_length())
    expanded = 4 * tokens * width if shape.num_kv_heads < shape.num_heads else 0
    return 4 * 128 * documents * width + expanded


def checkpoint_bytes(shape: ModelShape, request: RunRequest, tokens: int) -> int:
    """Activation checkpoints: the input of every layer, and the last one's output."""
    return tokens * shape.hidden_size * request.element_bytes * (shape.num_layers + 1)


def logits_bytes(shape: ModelShape, tokens: int, alive: float = k.LOGITS_ALIVE, smaller: int = 1) -> int:
    """Alive at once for one chunk of the loss: [chunk, vocabulary] in fp32, `alive` times. `smaller`: so many times are
    chunks smaller than `k.LOGITS_CHUNK_BYTES`."""
    return int(alive * 4 * chunk_tokens(shape, tokens, smaller) * shape.vocab_size)


def overlapped_s(*terms_s: float) -> float:
    """Wall clock of terms that run at the same time: the longest, and a residue of the second longest."""
    first, second, *_ = [*sorted(terms_s, reverse=True), 0.0, 0.0]
    return first + k.OVERLAP_RESIDUE * second
