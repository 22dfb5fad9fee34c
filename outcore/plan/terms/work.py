"""What a step costs in arithmetic and in traffic through the device's own memory. Shared by both engines."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.plan import constants as k
from outcore.plan.request import RunRequest
from outcore.sizing.activations import chunk_tokens
from outcore.sizing.shape import ModelShape


@dataclass(frozen=True)
class Flops:
    """FLOPs of one step on one GPU."""

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
    if not shape.fused_attention:  # the whole square, also what the mask hides
        attention *= 2.0
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


def device_bytes(
    shape: ModelShape, request: RunRequest, seq_length: int, micro_tokens: int, micro_batches: int
) -> tuple[float, float, float]:
    """(forward, head, backward) bytes of one step that pass through the device's own memory beside the matrix products'
    operands; recomputation and the adding up of gradients are backward's, the loss is the head's.

    Of `micro_batches` micro-batches of `micro_tokens` tokens in rows of `seq_length`, with fused element-wise work.

    Per token and layer forward: 8h (norms, residuals), 4(q + kv) (rotation, attention's operands), 3f (gated) or 2f;
    backward three times that, recomputation included. Loss: LOSS_BYTES_PER_LOGIT. Gradients: each micro-batch (of the
    head: each chunk of the loss) is read and added to an fp32 sum, 10 B per trained parameter. Adapters: the input is
    read for the narrow product, the wide one's result is written, and added to the layer's, in + 4 out; backward 5 in +
    4 out, and recomputation. Derived from the products, not measured.
    """
    e, h, f = request.element_bytes, shape.hidden_size, shape.ffn_width
    heads = shape.num_heads + shape.num_kv_heads
    per_token = e * (8 * h + 4 * heads * shape.head_dim + (3 if shape.gated_ffn else 2) * f)
    if not shape.fused_attention:
        per_token += e * k.SCORE_PASSES * shape.num_heads * seq_length
    layers = float(per_token * shape.num_layers * micro_tokens * micro_batches)
    passes = (2 if request.activation_checkpointing else 1) + 1
    per_logit = k.LOSS_BYTES_PER_LOGIT + (k.CAPPED_BYTES_PER_LOGIT * e if shape.caps_logits else 0)
    logits = per_logit * shape.vocab_size * micro_tokens * micro_batches
    summed = 0.0
    if shape.lora_r:
        active = shape.active_layer_params / max(1, sum(shape.layer_params))
        inner, outer = (float(sum(pair[side] for pair in shape.layer_matrices)) for side in (0, 1))
        one = active * e * micro_tokens * micro_batches
        layers += one * (inner + 4 * outer)
        summed = one * (3 * inner - 4 * outer)  # beside twice the forward's, as of the layers
    else:
        chunks = -(-micro_tokens // chunk_tokens(shape, micro_tokens))
        layer_passes = micro_batches if micro_batches > 1 else 0
        summed = 10.0 * (sum(shape.layer_params) * layer_passes + shape.head_weight_numel * chunks * micro_batches)
    return layers, logits, passes * layers + summed
