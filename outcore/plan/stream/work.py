"""What a step of the streaming engine needs on the device beside its buffers.

The engine asks this, too, before it decides how it holds units (outcore/sizing/tiles.py): both decide alike.
"""

from __future__ import annotations

from outcore.plan import constants as k
from outcore.plan.request import RunRequest
from outcore.plan.shape import ModelShape
from outcore.plan.work import (
    border_bytes,
    checkpoint_bytes,
    compiled_activation_bytes,
    layer_activation_bytes,
    logits_bytes,
    mask_bytes,
    mlp_activation_bytes,
)
from outcore.sizing.tiles import Work


def step_work(
    shape: ModelShape,
    request: RunRequest,
    seq_length: int,
    tokens: int,
    accumulation: int,
    *,
    checkpoints_home: str,
    compiled: bool,
    tile_bytes: int,
    chunk_bytes: int | None,
    masks: bool,
) -> Work:
    """Of a step of `accumulation` micro-batches of `tokens` tokens. `checkpoints_home`: 'vram', or elsewhere.

    `tile_bytes`: of a tile, where units are tiled; `chunk_bytes`: intermediates of an MLP that a tiled layer may hold.
    `masks`: packed rows have masks.
    """
    e, hidden = request.element_bytes, shape.hidden_size
    batch_hidden = tokens * accumulation * hidden * e
    # With another home: those of the last layers, whose backward comes at once, and one layer's on its way.
    checkpoints = (k.STAY_LAYERS + 1) * batch_hidden
    if checkpoints_home == "vram":
        checkpoints = checkpoint_bytes(shape, request, tokens * accumulation)
    eager = layer_activation_bytes(shape, request, seq_length, tokens)
    mlp = mlp_activation_bytes(shape, request, tokens)
    alive = e / 4 + (e / 4 if compiled else k.EAGER_LOSS_ALIVE)  # logits, and what their loss takes
    # Tiled: logits of one tile's rows; gradients of all tokens' hidden states are summed over tiles, in fp32.
    rows = min(shape.vocab_size, max(1, tile_bytes // (e * hidden)))
    of_tile = int(k.TILED_LOGITS_ALIVE * 4 * rows * min(tokens, max(16, k.LOGITS_CHUNK_BYTES // (4 * rows))))
    if masks:  # the one in use, and as bits those of all micro-batches of a step (outcore/flow/parts/masks.py)
        in_use = mask_bytes(shape, request, seq_length, tokens)
        packed = in_use + (tokens * seq_length * accumulation // 8 if in_use else 0)
    else:
        packed = border_bytes(shape, tokens) if shape.fused_attention else 0
    return Work(
        checkpoints=checkpoints,
        between=2 * batch_hidden,
        masks=packed,
        layer=compiled_activation_bytes(shape, request, seq_length, tokens) if compiled else eager,
        # Tiled layers are eager, and their MLP takes tokens in chunks.
        tiled_layer=eager if chunk_bytes is None else eager - mlp + min(mlp, chunk_bytes),
        head=logits_bytes(shape, tokens, alive, 1 if compiled else k.EAGER_CHUNKS),
        tiled_head=of_tile + 4 * tokens * accumulation * hidden,
        evaluation=logits_bytes(shape, tokens, k.EVAL_LOGITS_ALIVE) + 2 * k.EVAL_GROUP * tokens * hidden * e,
    )
