"""Bytes that a forward pass takes on the device, besides weights and keys and values: counted tensor by tensor.

Layers run one chunk of at most `chunk_tokens` at a time, so that one chunk's intermediates are alive; the hidden states
of all chunks wait between layers. A layer's peak is in its attention or in its feed-forward part. The head's logits
come when the layers are done. CUDA graphs hold memory of their own, which ordinary passes cannot use meanwhile.
`tests/infer/test_pass_bytes.py` holds this against what the allocator gave.

Legend: N tokens of a chunk, L tokens that they see, h hidden width, H query heads, K key heads, D, E widths of keys and
values, f feed-forward width, V vocabulary, e bytes of an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outcore.common.quantities import KIB, MIB
from outcore.sizing.activations import FUSED_CHUNKS, LOGITS_CHUNK_BYTES, LOSS_CHUNKS

GUESSED_TOKENS = 64
"""Guessed tokens of a pass, of all answers together, unless told."""
GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
"""Tokens of a pass that CUDA graphs run; padding costs nothing while weights are what a pass waits for."""
GRAPH_KEYS = 1 << 18
"""Keys that all rows of such a pass may see together."""
LEAST_GRAPH_ROWS = 64
"""Tokens of a pass that have room as CUDA graphs, however few answers there are."""
DRAWN_BYTES = 44
"""Bytes for every token of the vocabulary in each row of logits that is sorted to draw a token."""
TABLE_BYTES, LEAST_PAGE_TOKENS = 64 * KIB, 16
"""Small tensors of a pass, and the shortest page whose numbers in the chunks' tables are counted on."""
EXPERT_COPIES, BIASED_COPIES = 4, 9
"""Tensors of the width that a token goes through in its experts: gate and up in one, activation, product; where experts
have biases (GPT-OSS), those of every token, sums with them, and what is clamped."""
LIBRARY_BYTES = 64 * MIB
"""cuBLAS's work space, 32 MiB on Hopper (8 elsewhere) for each stream that multiplies: passes and captures."""


@dataclass(frozen=True)
class AttentionLimits:
    """Limits of what one product of an attention may hold."""

    scores: int = 1 << 25
    """128 MiB in fp32."""
    gathered: int = 1 << 25
    """Numbers of keys and values read back together: 64 MiB in 16 bits."""

    def gathered_pages(self, page_numel: int) -> int:
        """Pages of so many numbers that are read together."""
        return max(1, self.gathered // page_numel)


@dataclass(frozen=True)
class AttentionSize:
    """Widths of one kind of attention."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int | None = None
    is_plain: bool = True
    """Whether torch's fused kernels compute it, which keep no scores."""
    is_fused: bool = True
    """Whether they do so in pieces, too; those with a window have masks."""

    @property
    def width(self) -> int:
        """Numbers of a token's keys and values."""
        return self.kv_heads * (self.key_width + self.value_width)


@dataclass(frozen=True)
class LayerSize:
    """Widths of a model's widest layer."""

    hidden_size: int
    ffn_width: int
    """Width that one token goes through."""
    attentions: tuple[AttentionSize, ...]
    """Each kind once."""
    experts_per_token: int = 0
    experts_have_biases: bool = False


@dataclass(frozen=True)
class PassSize:
    """Tokens of a pass, and of the longest sequence in it."""

    DRAWN_ROWS: ClassVar[int] = 16
    """Rows of logits that are sorted together to draw tokens, or looked at for likelihoods."""
    LIKELIEST_ROWS: ClassVar[int] = 64
    """Answers whose logits are searched together for the likeliest token."""
    tokens: int
    chunk_tokens: int
    context_tokens: int
    sequences: int
    guessed_tokens: int = GUESSED_TOKENS

    @property
    def graph_rows(self) -> int:
        """Tokens of a pass that CUDA graphs run at most: short prompts, one token of each answer, guesses."""
        wanted = max(LEAST_GRAPH_ROWS, self.sequences + self.guessed_tokens)
        return next((rows for rows in GRAPH_ROWS if rows >= wanted), GRAPH_ROWS[-1])


def pass_bytes(
    layer: LayerSize,
    vocab_size: int,
    size: PassSize,
    itemsize: int,
    *,
    is_packed_kv: bool = False,
    has_graphs: bool = False,
    limits: AttentionLimits | None = None,
) -> int:
    """Most bytes at a time. `has_graphs`: passes of few tokens run as CUDA graphs; `is_packed_kv`: keys and values are
    stored in 8 bits."""
    limits, chunk = limits or AttentionLimits(), min(size.chunk_tokens, size.tokens, size.context_tokens)

    def layers(tokens: int) -> int:
        return layer_bytes(layer, tokens, size.context_tokens, itemsize, is_packed_kv=is_packed_kv, limits=limits)

    width = layer.attentions[0].key_width if layer.attentions else 0
    # Hidden states, cosines and sines, ids, positions and slots of every token; pages that every chunk sees.
    waiting = size.tokens * (layer.hidden_size * itemsize + 2 * width * itemsize + 6 * 8)
    waiting += -(-size.tokens // chunk) * size.context_tokens // LEAST_PAGE_TOKENS * 8
    found = TABLE_BYTES + waiting + max(layers(chunk), logits_bytes(layer, vocab_size, size, itemsize))
    if has_graphs:
        rows = size.graph_rows
        found += LIBRARY_BYTES + layers(chunk) + rows * (vocab_size * 2 * itemsize + layer.hidden_size * 4)
        # Every row reads pages of its own.
        keys = min(GRAPH_KEYS, rows * size.context_tokens)
        gathered = max((min(limits.gathered, keys * a.width) for a in layer.attentions), default=0)
        found += int(gathered * _read_back_bytes(itemsize, is_packed_kv))
        shares = sum(1 + itemsize * (a.heads // a.kv_heads) for a in layer.attentions)
        found += GRAPH_KEYS * (2 * 8 + shares)  # numbers of keys, which of them rows see, and that as numbers
    return found


def _read_back_bytes(itemsize: int, is_packed_kv: bool) -> float:
    """Bytes for each number of keys and values that is read back; those of 8 bits, and in fp32, of keys or values."""
    return itemsize + (2.5 if is_packed_kv else 0)


def logits_bytes(layer: LayerSize, vocab_size: int, size: PassSize, itemsize: int) -> int:
    """At the head: logits of every token that is chosen and every guess, as they come and in fp32, then those of some
    answers again, to find the likeliest, to draw or for likelihoods; or of one chunk of a text that is scored."""
    rows = min(size.sequences + size.guessed_tokens, size.tokens)
    made = itemsize if itemsize < 4 else 0
    likeliest = min(rows, size.LIKELIEST_ROWS + size.guessed_tokens) * 4
    drawn = min(size.sequences, rows, size.DRAWN_ROWS) * (12 + DRAWN_BYTES)
    answers = vocab_size * (rows * 4 + max(rows * made, likeliest, drawn))
    scored = 0
    for smaller, of_number in ((LOSS_CHUNKS, 8 + made), (FUSED_CHUNKS, itemsize)):
        most = max(16, LOGITS_CHUNK_BYTES // smaller // (4 * vocab_size))
        scored = max(scored, vocab_size * min(most, size.chunk_tokens, size.tokens) * of_number)
    chunk = min(size.chunk_tokens, size.tokens)
    return max(answers, scored) + chunk * layer.hidden_size * (itemsize + 8)


def layer_bytes(
    layer: LayerSize,
    tokens: int,
    context_tokens: int,
    itemsize: int,
    *,
    is_packed_kv: bool = False,
    limits: AttentionLimits | None = None,
) -> int:
    """A layer over a chunk, its input not counted: what comes of the attention beside the residual stream, or three
    tensors of the feed-forward width (gate, up, product) and the two residuals."""
    limits, h = limits or AttentionLimits(), layer.hidden_size
    of_experts = BIASED_COPIES if layer.experts_have_biases else EXPERT_COPIES
    copies = of_experts if layer.experts_per_token else 3
    forward = tokens * itemsize * (copies * layer.ffn_width + 2 * h + 3 * layer.experts_per_token * h)
    attended = [
        attention_bytes(size, tokens, context_tokens, itemsize, is_packed_kv, limits) for size in layer.attentions
    ]
    return max(forward, tokens * h * itemsize + max(attended, default=0))


def attention_bytes(
    size: AttentionSize, tokens: int, context_tokens: int, itemsize: int, is_packed_kv: bool, limits: AttentionLimits
) -> int:
    """Queries, keys, values and output, and what the dearest way holds: pages read back, then either a copy of the
    queries with the sums of all pieces and of one in fp32 (no scores), or scores in fp32 and once in 16 bits."""
    heads, groups = size.heads, size.heads // size.kv_heads
    queries, outputs = tokens * heads * size.key_width, tokens * heads * size.value_width
    base = itemsize * (queries + outputs + tokens * size.width)
    before = context_tokens if size.window is None else size.window + tokens
    seen = max(tokens, min(context_tokens, before))
    made = itemsize if itemsize < 4 else 0
    per_number = _read_back_bytes(itemsize, is_packed_kv)
    gathered = min(limits.gathered, seen * size.width)
    sums = outputs * (8 + made) + 24 * tokens * heads + itemsize * queries
    scores = min(limits.scores, tokens * heads * seen)
    in_memory = sums + int(gathered * per_number) + scores * (4 + made) + 2 * (scores // heads)
    if not size.is_plain:
        return base + in_memory
    # The mask, its rows repeated for the query heads that share a key head, the reverse of it, and that as numbers.
    masks = scores // heads * (1 + groups * (2 + itemsize))
    at_once = int(gathered * per_number) + itemsize * (queries + outputs) + masks
    if not size.is_fused or size.window is not None:
        return base + max(at_once, in_memory)
    pieces = max(int(gathered * per_number), itemsize * tokens * heads * (size.key_width + size.value_width))
    return base + max(at_once, sums + pieces)
