"""Bytes that a step of the streaming engine needs on the device besides its buffers: asked by the planner, and by the
engine before it decides how it holds parts (`tiles`), so both decide alike."""

from __future__ import annotations

from outcore.sizing.activations import (
    EAGER_CHUNKS,
    LOGITS_CHUNK_BYTES,
    LONG_TOKENS,
    LOSS_CHUNKS,
    border_bytes,
    checkpoint_bytes,
    compiled_activation_bytes,
    layer_activation_bytes,
    logits_bytes,
    long_head_bytes,
    long_layer_bytes,
    long_rows_bytes,
    long_tile_tokens,
    mask_bytes,
    mlp_activation_bytes,
)
from outcore.sizing.shape import ModelShape
from outcore.sizing.streaming import EVAL_GROUP, EVAL_TOKENS, STAY_LAYERS
from outcore.sizing.tiles import TilingWork

TILED_LOGITS_ALIVE = 4.0
"""Chunks' worth of logits alive at once where the head is computed in tiles. A planning figure."""
EVAL_LOGITS_ALIVE = 2.5 / LOSS_CHUNKS
"""Chunks' worth of logits alive in an evaluation: 16-bit logits, fp32 copy, its log-softmax, of smaller chunks."""
EAGER_LOSS_ALIVE = 1.5
"""Share where loss and gradient are computed at once without a compiler: beside the logits of the chunk, in fp32
logits. Compiled: the gradient, in the logits' type (outcore/engine/stream/backward/head.py)."""


def step_work(
    shape: ModelShape,
    e: int,
    seq_length: int,
    tokens: int,
    accumulation: int,
    *,
    checkpoints_home: str,
    compiled: bool,
    tile_bytes: int,
    chunk_bytes: int | None,
    masks: bool,
) -> TilingWork:
    """Bytes that a step of the streaming engine needs on the device besides its buffers, by engine and planner alike:
    of `accumulation` micro-batches of `tokens` tokens of `e` bytes an element. `checkpoints_home`: 'vram', or
    elsewhere.

    `tile_bytes`: of a tile, where units are tiled; `chunk_bytes`: intermediates of an MLP that a tiled layer may hold.
    `masks`: packed rows have masks."""
    hidden = shape.hidden_size
    batch_hidden = tokens * accumulation * hidden * e
    # With another home: those of the last layers, whose backward comes at once, and one layer's on its way.
    checkpoints = (STAY_LAYERS + 1) * batch_hidden
    if checkpoints_home == "vram":
        checkpoints = checkpoint_bytes(shape, e, tokens * accumulation)
    eager = layer_activation_bytes(shape, e, seq_length, tokens)
    mlp = mlp_activation_bytes(shape, e, tokens)
    alive = e / 4 + (e / 4 if compiled else EAGER_LOSS_ALIVE)  # logits, and what their loss takes
    if shape.caps_logits:  # the result of tanh, which autograd keeps, and one more gradient
        alive += 2 * e / 4
    # Tiled: logits of one tile's rows; gradients of all tokens' hidden states are summed over tiles, in fp32.
    rows = min(shape.vocab_size, max(1, tile_bytes // (e * hidden)))
    of_tile = int(TILED_LOGITS_ALIVE * 4 * rows * min(tokens, max(16, LOGITS_CHUNK_BYTES // (4 * rows))))
    if masks:  # the one in use, and as bits those of all micro-batches of a step (outcore/flow/parts/shell.py)
        in_use = mask_bytes(shape, e, seq_length, tokens)
        packed = in_use + (tokens * seq_length * accumulation // 8 if in_use else 0)
    else:
        packed = border_bytes(shape, tokens) if shape.fused_attention else 0
    together = min(EVAL_GROUP, -(-EVAL_TOKENS // tokens))
    head = logits_bytes(shape, tokens, alive, 1 if compiled else EAGER_CHUNKS)
    evaluation = logits_bytes(shape, tokens, EVAL_LOGITS_ALIVE)
    tiled_head = of_tile + 4 * tokens * accumulation * hidden

    def long(tile_tokens: int, *, near: bool) -> TilingWork:
        long_head = long_head_bytes(shape, e, tokens, tile_tokens)
        return TilingWork(
            checkpoints=0,
            between=0,
            masks=packed if masks else packed // max(1, shape.num_kv_heads),  # the kernel's: of a group of heads
            layer=long_layer_bytes(shape, e, tokens, tile_tokens, near=near, compiled=compiled),
            tiled_layer=0,
            head=head + long_head,
            tiled_head=tiled_head + 4 * batch_hidden,  # which has all rows whole, and an fp32 copy for their norm
            evaluation=evaluation + long_head,
            at_embedding=2 * tokens * hidden * e,
            tile_tokens=tile_tokens,
            rows=long_rows_bytes(shape, e, tokens, accumulation) if near else 0,
        )

    least = long_tile_tokens(shape, e, tile_bytes)
    larger = [size for size in (4 * least, 2 * least) if 0 < size <= min(LONG_TOKENS, tokens)]
    cuts = [long(size, near=near) for near in (True, False) for size in (*larger, least) if 0 < least < tokens]
    return TilingWork(
        checkpoints=checkpoints,
        between=2 * batch_hidden,
        masks=packed,
        layer=compiled_activation_bytes(shape, e, seq_length, tokens) if compiled else eager,
        # Tiled layers are eager, and their MLP takes tokens in chunks.
        tiled_layer=eager if chunk_bytes is None else eager - mlp + min(mlp, chunk_bytes),
        head=head,
        tiled_head=tiled_head,
        evaluation=evaluation + 2 * together * tokens * hidden * e,
        long=tuple(cuts),
    )
