"""Bytes that a micro-batch takes on the device while it is computed: activations of a layer, masks, logits.

Notation: T tokens of a micro-batch, h hidden width, q / kv widths of queries / keys, f feed-forward width that one
token goes through, e bytes of an element. Attention is fused (no T x T scores) unless the shape says otherwise."""

from __future__ import annotations

from outcore.common.quantities import MIB
from outcore.sizing.shape import ModelShape
from outcore.sizing.tiles import LEAST_TOKENS, MOST_TOKENS, TILES_HELD, Holding

LOGITS_CHUNK_BYTES = 256 * MIB
"""fp32 logits of one chunk; with their gradient and the 16-bit copies about three times as much is alive at once."""
LOSS_CHUNKS, EAGER_CHUNKS = 4, 2
"""So many times smaller are chunks of a loss alone, which makes fp32 copies and should not need more memory than
training; and chunks whose loss and gradient are computed at once without a compiler, which takes twice the memory."""
FUSED_CHUNKS = 1
"""Value of `LOSS_CHUNKS` where a compiler makes no fp32 copies: products are larger, the weight is read less often."""
LOGITS_ALIVE = 3.0
"""Chunks' worth alive at once where autograd computes the loss: the fp32 log-softmax that it keeps, the gradient of the
loss with respect to it and the one with respect to the logits (outcore/model/loss.py: of one chunk at a time)."""
COMPILED_ACTIVATIONS = 0.6
"""Share of an eager layer's saved tensors that a compiled layer's backward holds. A planning figure."""


BLOCK_TILES, BLOCK_TOKENS = 4, 8192
"""Tiles of long rows that cross the link together, if they have no more than so many tokens: each copy takes the host
time that launches need, too."""
LONG_TOKENS = 8192
"""Tokens of the largest tile of long rows. A fast GPU computes one of 2,048 sooner than the host launches the next."""


def auto_num_chunks(num_tokens: int, vocab_size: int, chunk_bytes: int = LOGITS_CHUNK_BYTES) -> int:
    """Chunks so that one chunk's fp32 logits stay within `chunk_bytes` (at least 16 tokens a chunk)."""
    tokens_per_chunk = max(16, chunk_bytes // (4 * max(vocab_size, 1)))
    return max(1, -(-num_tokens // tokens_per_chunk))


def chunk_tokens(shape: ModelShape, tokens: int, smaller: int = 1) -> int:
    """Tokens whose logits are alive at once."""
    return min(tokens, max(16, LOGITS_CHUNK_BYTES // smaller // (4 * max(shape.vocab_size, 1))))


def layer_activation_bytes(shape: ModelShape, e: int, seq_length: int, tokens: int) -> int:
    """Bytes that autograd keeps of one layer, and the gradients alive at the peak of its backward pass.

    Per token: two norms (fp32 copy, normed, output: 4h + 2eh each), the residual stream (2eh), queries before and after
    rotation, attention output twice (4eq), keys and values (3e kv), gated feed-forward (gate, its activation, up,
    product: 4ef; plain: 3ef), copies for experts (2eh each); in flight: 2ef + 2eh."""
    h, f = shape.hidden_size, shape.ffn_width
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    per_token = 2 * (4 * h + 2 * e * h) + 2 * e * h + e * (4 * q + 3 * kv)
    per_token += e * f * (4 if shape.gated_ffn else 3) + 2 * e * h * shape.experts_per_token
    per_token += 2 * e * (f + h)
    if not shape.fused_attention:
        per_token += shape.num_heads * seq_length * (e + 4)
    return tokens * per_token


def layer_backward_bytes(shape: ModelShape, e: int, seq_length: int, tokens: int) -> int:
    """Alive at the peak of an uncompiled dense layer's backward: where the gated product is taken apart.

    Per token: two norms (4h + 2eh each), rotated queries and attention's output (2eq), keys and values (2e kv), gate,
    its activation and up (3ef), and gradients of the product and of both its factors (3ef). What
    `layer_activation_bytes` has beyond that is not kept for the backward: residual stream, queries and keys before
    their rotation. Layers of other kinds: as that has them."""
    if not shape.gated_ffn or shape.is_moe or not shape.fused_attention:
        return layer_activation_bytes(shape, e, seq_length, tokens)
    h = shape.hidden_size
    width = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return tokens * (2 * (4 * h + 2 * e * h) + 2 * e * width + 6 * e * shape.ffn_width)


def compiled_activation_bytes(shape: ModelShape, e: int, seq_length: int, tokens: int) -> int:
    """Alive at the peak of a compiled layer's backward.

    Adapters add nothing that counts (outcore/flow/layers/compiled.py): in the code that torch 2.13's compiler makes
    for the CPU, what is alive of a layer of Llama, Qwen3, Gemma 2 or GPT-2 is within 1 % of that without them, or less.
    """
    return int(COMPILED_ACTIVATIONS * layer_activation_bytes(shape, e, seq_length, tokens))


def long_tile_tokens(shape: ModelShape, e: int, tile_bytes: int) -> int:
    """Tokens of a tile of long rows: a power of two whose activations in an eager layer take what `TILES_HELD` tiles
    of weights do; 0 where attention is not fused, whose scores no tile makes smaller."""
    if not shape.fused_attention or shape.is_encoder_decoder:
        return 0
    most = TILES_HELD * tile_bytes // layer_activation_bytes(shape, e, 0, 1)
    return min(MOST_TOKENS, max(LEAST_TOKENS, 1 << max(0, most.bit_length() - 1)))


def long_block_tokens(tile_tokens: int) -> int:
    """Tokens of long rows that cross the link together, a multiple of a tile's."""
    return tile_tokens * max(1, min(BLOCK_TILES, BLOCK_TOKENS // tile_tokens))


def long_layer_bytes(
    shape: ModelShape, e: int, tokens: int, tile_tokens: int, *, near: bool = False, compiled: bool = False
) -> int:
    """Alive at the peak of a layer's backward on rows of `tokens` tokens in all, in tiles of `tile_tokens`.

    Of whole rows, for each head what the flash kernel keeps (4 bytes a token); and of one group of heads: its queries,
    keys and values three times, attention's result and its gradient twice (one here, one coming, one leaving), and
    gradients of queries, keys and values, in fp32 those of queries as the kernel sums them. Otherwise of a tile: a
    whole layer's activations, with blocks that come (three of each) and leave (two).

    `near`: beside whole rows on the device (`long_rows_bytes`) of a group only its result and the gradients, of a tile
    its own queries, keys, values and results, and blocks of hidden states."""
    h, q, qkv = _widths(shape)
    block = min(tokens, long_block_tokens(tile_tokens))
    in_tiles = (compiled_activation_bytes if compiled else layer_activation_bytes)(shape, e, 0, tile_tokens)
    if near:
        group = e * (qkv + 2 * q) + 4 * q
        in_tiles += block * e * 5 * h + tile_tokens * e * 2 * (q + qkv)
    else:
        group = e * (3 * qkv + 4 * q) + e * qkv + 4 * q
        in_tiles += block * e * (8 * h + max(5 * q, 3 * qkv))
    return tokens * 4 * shape.num_heads + max(tokens * group // max(1, shape.num_kv_heads), in_tiles)


def long_rows_bytes(shape: ModelShape, e: int, tokens: int, accumulation: int) -> int:
    """Whole rows of one layer: the gradient of its output, of all micro-batches; queries, keys and values, attention's
    result and its gradient."""
    h, q, qkv = _widths(shape)
    return e * tokens * (accumulation * h + qkv + 2 * q)


def long_head_bytes(shape: ModelShape, e: int, tokens: int, tile_tokens: int) -> int:
    """Alive beside logits at the head of long rows: blocks of hidden states that come and of gradients that leave, a
    tile's last norm."""
    block = min(tokens, long_block_tokens(tile_tokens))
    return shape.hidden_size * (5 * e * block + (4 + 4 * e) * tile_tokens)


def long_ram_bytes(shape: ModelShape, e: int, tokens: int, accumulation: int, holding: Holding) -> int | None:
    """RAM of long rows' homes: every layer's input and the last one's output, in whose place is its gradient; where a
    layer's whole rows are not on the device, of one layer queries, keys, values, attention's result and its gradient.
    None where rows are whole."""
    if not holding.tile_tokens:
        return None
    h, q, qkv = _widths(shape)
    return e * tokens * (accumulation * (shape.num_layers + 1) * h + (0 if holding.near else qkv + 2 * q))


def long_link_bytes(
    shape: ModelShape, e: int, tokens: int, *, near: bool = False
) -> tuple[tuple[int, int], tuple[int, int]]:
    """((up, down) in forward, (up, down) in backward) of long rows over the link, all layers. `near`: hidden states.

    Forward: up the input twice, queries, keys and values, attention's result; down these and the output. Backward: up
    the input three times, the others as in forward, and once more for attention's backward with its result's gradient,
    which came down, as the gradients of queries, keys and values do; that of the output up and down twice."""
    h, q, qkv = _widths(shape)
    row = shape.num_layers * e * tokens
    if near:
        return (row * 2 * h, row * h), (row * 3 * h, 0)
    return (row * (2 * h + qkv + q), row * (h + qkv + q)), (row * (5 * h + 3 * qkv + 3 * q), row * 2 * (h + qkv + q))


def _widths(shape: ModelShape) -> tuple[int, int, int]:
    """(hidden width, queries' width, that of queries, keys and values)."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return shape.hidden_size, q, q + 2 * kv


def forward_bytes(shape: ModelShape, e: int, tokens: int) -> int:
    """Alive at the peak of a compiled layer's forward that nothing is kept of: residual stream and its norm, and of the
    feed-forward part gate, up and product (plain: two)."""
    return tokens * e * (2 * shape.hidden_size + (3 if shape.gated_ffn else 2) * shape.ffn_width)


def mlp_activation_bytes(shape: ModelShape, e: int, tokens: int) -> int:
    """Part of `layer_activation_bytes`: the intermediates of the feed-forward part."""
    return tokens * e * shape.ffn_width * ((4 if shape.gated_ffn else 3) + 2)


def has_masks(packed_attention: str, e: int) -> bool:
    """Whether packed rows have masks of T x T: asked for, or in fp32, which the flash kernel does not take."""
    return packed_attention == "masks" or e == 4


def mask_bytes(shape: ModelShape, e: int, seq_length: int, tokens: int) -> int:
    """Bytes of a micro-batch in which a row holds several documents: a boolean mask [rows, T, T], and the numbers
    that the attention kernel makes of it. 0 where rows are not packed, or the scores outweigh it."""
    if shape.is_encoder_decoder or not shape.fused_attention:
        return 0
    return tokens * seq_length * (1 + e)


def border_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes that the flash kernel's backward takes for packed rows beyond what it takes for rows of one document: an
    fp32 gradient of the queries for 128 tokens of each of `tokens` / 256 documents (as many as borders are usually held
    for), and with grouped queries keys' and values' gradients for every head (outcore/model/packed/trial.py)."""
    width = shape.num_heads * shape.head_dim
    documents = 1 << max(4, (max(1, tokens // 256) - 1).bit_length())
    expanded = 4 * tokens * width if shape.num_kv_heads < shape.num_heads else 0
    return 4 * 128 * documents * width + expanded


def checkpoint_bytes(shape: ModelShape, e: int, tokens: int) -> int:
    """Activation checkpoints: the input of every layer, and the last one's output."""
    return tokens * shape.hidden_size * e * (shape.num_layers + 1)


def logits_bytes(shape: ModelShape, tokens: int, alive: float = LOGITS_ALIVE, smaller: int = 1) -> int:
    """Alive at once for one chunk of the loss: [chunk, vocabulary] in fp32, `alive` times. `smaller`: so many times are
    chunks smaller than `LOGITS_CHUNK_BYTES`."""
    return int(alive * 4 * chunk_tokens(shape, tokens, smaller) * shape.vocab_size)
