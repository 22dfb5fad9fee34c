"""Attention over what is there, exactly: in one piece by torch's fused kernel, or in pieces merged by log-sum-exp.

Pieces serve contexts that do not fit beside the weights: keys and values come a few pages at a time, each piece gives
its part of the sum and the logarithm of its weight, and the parts add up to what one piece would have given (to
rounding). Legend: B rows, N tokens of a row, L keys, H query heads, K key heads, D width of keys, E width of values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

IN_ORDER = "in order"
"""In place of a mask: as many keys as tokens, each of which sees itself and those before it."""
Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor | Literal["in order"] | None]
"""(keys [..., L, K, D], values [..., L, K, E], mask [..., N, L]); without a mask every token sees all of it."""


@dataclass(frozen=True)
class AttentionRule:
    """Rule of an attention besides its tensors: scale, window, softcap and sinks."""

    scaling: float
    window: int | None = None
    """Tokens that a token sees, itself included."""
    softcap: float | None = None
    """Scores are bent to stay below this."""
    sinks_H: torch.Tensor | None = None
    """One logit a head that takes weight and gives nothing (GPT-OSS)."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused kernel computes it."""
        return self.softcap is None and self.sinks_H is None


def causal_mask(
    starts_B: torch.Tensor, count: int, firsts_B: torch.Tensor, num_keys: int, window: int | None
) -> torch.Tensor:
    """Bool [B, 1, N, L]: which keys each token sees. Row b's tokens are at starts_B[b] and after, its keys at
    firsts_B[b] and after."""
    device = starts_B.device
    tokens = starts_B[:, None] + torch.arange(count, device=device)
    keys = firsts_B[:, None] + torch.arange(num_keys, device=device)
    seen = keys[:, None, :] <= tokens[:, :, None]
    if window is not None:
        seen &= keys[:, None, :] > tokens[:, :, None] - window
    return seen[:, None]


def attend_at_once(
    query_BHND: torch.Tensor,
    keys_BKLD: torch.Tensor,
    values_BKLE: torch.Tensor,
    mask: torch.Tensor | None,
    rule: AttentionRule,
) -> torch.Tensor:
    """[B, H, N, E]. `mask` None: N = L, each token sees itself and those before it. A mask [B, 1, N, L] may come with
    its rows repeated for the query heads that share a key head, and, where the rule is plain, as a bias."""
    batch, heads, count, _ = query_BHND.shape
    num_kv = keys_BKLD.shape[1]
    shares = heads != num_kv
    if rule.is_plain and shares and mask is not None:  # fused kernels with a mask know no shared heads: as more tokens
        grouped = query_BHND.reshape(batch, num_kv, heads // num_kv * count, -1)
        repeated = mask if mask.shape[2] == grouped.shape[2] else mask.repeat(1, 1, heads // num_kv, 1)
        found = scaled_dot_product_attention(grouped, keys_BKLD, values_BKLE, attn_mask=repeated, scale=rule.scaling)
        return found.reshape(batch, heads, count, -1)
    if rule.is_plain:
        return scaled_dot_product_attention(
            query_BHND,
            keys_BKLD,
            values_BKLE,
            attn_mask=mask,
            is_causal=mask is None and query_BHND.shape[2] > 1,
            scale=rule.scaling,
            enable_gqa=shares,
        )
    if mask is None:
        mask = torch.ones((count, count), dtype=torch.bool, device=query_BHND.device).tril()
    return attend_in_pieces(query_BHND, [(keys_BKLD.transpose(1, 2), values_BKLE.transpose(1, 2), mask)], rule)


def attend_in_pieces(query_HND: torch.Tensor, pieces: Iterable[Piece], rule: AttentionRule) -> torch.Tensor:
    """[..., H, N, E], the same for all leading dimensions. Pieces come one after another and are let go before the next
    is asked for; one that has no mask of its own must be `is_fused`."""
    sums = (*query_HND.shape[:-1], 1)
    most = torch.full(sums, float("-inf"), device=query_HND.device)
    weight = torch.zeros_like(most)
    if rule.sinks_H is not None:
        most = rule.sinks_H.float().view(-1, 1, 1).expand(sums)
        weight = torch.ones(sums, device=query_HND.device)
    total: torch.Tensor | None = None
    for piece in pieces:
        keys, values, mask = piece
        if isinstance(mask, torch.Tensor):
            part, own_weight, own_most = _scored(query_HND, keys, values, mask, rule)
        else:
            part, own_weight, own_most = _fused(query_HND, keys, values, mask, rule)
        del piece, keys, values, mask
        higher = torch.maximum(most, own_most)
        base = torch.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: keep exp away from inf - inf
        faded, share = torch.exp(most - base), torch.exp(own_most - base)
        total = part.mul_(share) if total is None else total.mul_(faded).add_(part.mul_(share))
        weight, most = weight * faded + own_weight * share, higher
        del part
    assert total is not None, "attention over nothing"
    return total.div_(weight).to(query_HND.dtype)


def _scored(
    query_HND: torch.Tensor,
    keys_LKD: torch.Tensor,
    values_LKE: torch.Tensor,
    mask_NL: torch.Tensor,
    rule: AttentionRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sum of values [..., H, N, E], of weights, logarithm that both are relative to), all fp32, by scores in memory:
    made in place, in fp32 and once in the values' type."""
    *batch, heads, count, width = query_HND.shape
    num_kv = keys_LKD.shape[-2]
    grouped = query_HND.reshape(*batch, num_kv, heads // num_kv * count, width)
    keys_KDL = keys_LKD.movedim(-3, -1)
    scores = (grouped @ keys_KDL).float().view(*batch, heads, count, -1).mul_(rule.scaling)
    if rule.softcap is not None:
        scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    scores.masked_fill_(~mask_NL, float("-inf"))
    most = scores.amax(-1, keepdim=True)
    weights = scores.sub_(torch.where(most == float("-inf"), 0.0, most)).exp_()
    of_groups = weights.view(*batch, num_kv, -1, weights.shape[-1]).to(values_LKE.dtype)
    part = (of_groups @ values_LKE.transpose(-3, -2)).float()
    return part.view(*batch, heads, count, -1), weights.sum(-1, keepdim=True), most


def is_fused(query_HND: torch.Tensor, value_width: int, rule: AttentionRule) -> bool:
    """Whether torch's fused kernel, which keeps no scores, gives such an attention with the logarithm of its weight."""
    width = query_HND.shape[-1]
    return rule.is_plain and value_width == width and has_fused(query_HND.device, query_HND.dtype, width)


def has_fused(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the device has that kernel for keys of this type and width."""
    if device.type == "cpu":
        return True
    fits = dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256
    return fits and torch.cuda.get_device_capability(device) >= (8, 0)


def _fused(
    query_HND: torch.Tensor,
    keys_LKD: torch.Tensor,
    values_LKE: torch.Tensor,
    order: Literal["in order"] | None,
    rule: AttentionRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute what `_scored` computes by torch's fused kernel, which keeps no scores."""
    heads, count, width = query_HND.shape
    keys, values = keys_LKD.transpose(0, 1), values_LKE.transpose(0, 1)
    if order is None:  # the query heads of a key head as more tokens of it
        query = query_HND.reshape(len(keys), -1, width)
    else:
        query = query_HND
        keys, values = (rows.repeat_interleave(heads // len(rows), 0) for rows in (keys, values))
    ops, asked = torch.ops.aten, (query[None], keys[None], values[None], 0.0, order is not None)
    if query.device.type == "cpu":
        found = ops._scaled_dot_product_flash_attention_for_cpu(*asked, scale=rule.scaling)
    else:
        found = ops._scaled_dot_product_flash_attention(*asked, False, scale=rule.scaling)
    part, most = found[0].float().reshape(heads, count, -1), found[1].float().reshape(heads, count, 1)
    return part, torch.ones_like(most), most
