"""Attention over pages of keys and values, exact wherever they live."""

from outcore.infer.attention.exact import (
    AttentionRule,
    attend_at_once,
    attend_in_pieces,
    causal_mask,
    has_fused,
    is_fused,
)
from outcore.infer.attention.paged import PagedAttention, Site, UnknownAttention
from outcore.infer.attention.tiles import LONG_ROWS, SINGLE_TOKENS, SPLIT_KEYS, has_kernel
