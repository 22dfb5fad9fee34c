"""Bytes that a step of the streaming engine needs on the device besides its buffers, and what is in tiles for want of
them: asked by the planner, and by the engine before it decides how it holds parts (`tiles`), so both decide alike."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

from outcore.sizing.activations import (
    EAGER_CHUNKS,
    LOGITS_CHUNK_BYTES,
    LONG_TOKENS,
    LOSS_CHUNKS,
    border_bytes,
    checkpoint_bytes,
    compiled_activation_bytes,
    has_masks,
    layer_activation_bytes,
    logits_bytes,
    long_head_bytes,
    long_layer_bytes,
    long_rows_bytes,
    long_tile_tokens,
    mask_bytes,
    mlp_activation_bytes,
)
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.shape import ModelShape
from outcore.sizing.streaming import EVAL_GROUP, EVAL_TOKENS, STAY_LAYERS
from outcore.sizing.tiles import RESIDENT_SHARE, Model, Tiling, TilingWork, UnitSize, choose_tiling
from outcore.sizing.training import PartNeeds, parts_of_shape

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
    layout: StreamLayout,
    tile_bytes: int,
    chunk_bytes: int | None,
) -> TilingWork:
    """Bytes that a step of the streaming engine needs on the device besides its buffers, by engine and planner alike:
    of micro-batches of `tokens` tokens of `e` bytes an element, as many as `layout` accumulates.

    `tile_bytes`: of a tile, where units are tiled; `chunk_bytes`: intermediates of an MLP that a tiled layer may
    hold."""
    hidden, accumulation, compiled = shape.hidden_size, layout.accumulation, layout.compiled
    masks = has_masks(layout.packed_attention, e)
    batch_hidden = tokens * accumulation * hidden * e
    # With another home: those of the last layers, whose backward comes at once, and one layer's on its way.
    checkpoints = (STAY_LAYERS + 1) * batch_hidden
    if layout.checkpoints_home == "vram":
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


def tiling_of_shape(
    shape: ModelShape, e: int, seq_length: int, tokens: int, layout: StreamLayout, device_bytes: int | None
) -> Tiling:
    """Choose the tiling of such a model, in micro-batches of `tokens` tokens, as the engine will once it has taken the
    model apart. `device_bytes`: memory of the device; None: no limit is known."""
    layout = replace(layout, compiled=layout.compiled and not shape.stays_eager)
    return choose_tiling(
        layout.tiling,
        device_bytes,
        layout.tile_bytes,
        layout.layer_buffers,
        partial(_model, shape, e),
        partial(step_work, shape, e, seq_length, tokens, layout),
        may_cut_rows=layout.checkpoints_home == "ram",
    )


@lru_cache(maxsize=16)
def _model(shape: ModelShape, e: int, tile_bytes: int) -> Model:
    """Parts as the engine takes the model apart."""
    layers, ends = parts_of_shape(shape, e)
    least = tile_bytes // RESIDENT_SHARE
    widest = shape.hidden_size * max(shape.num_heads * shape.head_dim, shape.ffn_width)

    def unit(index: int, is_layer: bool, part: PartNeeds, largest: int) -> UnitSize:
        expanded = part.size_bytes if part.home_bytes < part.size_bytes else 0
        return UnitSize(index, is_layer, part.home_bytes, part.trained, e * largest > least, expanded_bytes=expanded)

    found = [unit(0, False, ends[0], shape.head_weight_numel)]
    for number, (part, params) in enumerate(zip(layers, shape.layer_params, strict=True)):
        found.append(unit(1 + number, True, part, params // 4 if shape.is_moe else widest))
    found += [unit(1 + len(layers), False, end, shape.head_weight_numel) for end in ends[1:]]
    return Model(tuple(found), e, tied=shape.tied)
