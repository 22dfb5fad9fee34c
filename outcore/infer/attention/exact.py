"""Attention over what is there, exactly: in one piece by torch's fused kernel, or in pieces merged by log-sum-exp.

Pieces serve contexts that do not fit beside the weights: keys and values come a few pages at a time, each piece gives
its part of the sum and the logarithm of its weight, and the parts add up to what one piece would have given (to
rounding). Legend: B rows, N tokens of a row, L keys, H query heads, K key heads, D width of keys, E width of values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

PIECE_NUMEL = 1 << 25
"""Scores of one piece at most: 128 MiB in fp32."""


@dataclass(frozen=True)
class AttentionRule:
    """What an attention asks besides its tensors."""

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
    groups = heads // num_kv
    keys, values = keys_BKLD.repeat_interleave(groups, 1), values_BKLE.repeat_interleave(groups, 1)
    scores = _bent((query_BHND @ keys.transpose(-1, -2)).float() * rule.scaling, rule)
    scores = scores.masked_fill(~mask, float("-inf"))
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return weights.to(values.dtype) @ values


def attend_in_pieces(
    query_HND: torch.Tensor,
    pieces: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
    rule: AttentionRule,
) -> torch.Tensor:
    """[H, N, E] of one sequence. `pieces`: (keys [L, K, D], values [L, K, E], mask [N, L]) one after another; without a
    mask every token sees all of the piece, which must be `is_fused`."""
    heads, count, _ = query_HND.shape
    device = query_HND.device
    most = torch.full((heads, count, 1), float("-inf"), device=device)
    weight = torch.zeros((heads, count, 1), device=device)
    if rule.sinks_H is not None:
        most = rule.sinks_H.float().view(-1, 1, 1).expand(heads, count, 1).clone()
        weight = torch.ones_like(most)
    total: torch.Tensor | None = None
    for keys_LKD, values_LKE, mask_NL in pieces:
        num_kv = keys_LKD.shape[1]
        grouped = query_HND.reshape(num_kv, heads // num_kv * count, -1)
        if mask_NL is None:
            part, logarithm = _fused(grouped, keys_LKD, values_LKE, rule)
            part, logarithm = part.float().reshape(heads, count, -1), logarithm.reshape(heads, count, 1)
            higher = torch.maximum(most, logarithm)
            faded, share = torch.exp(most - higher), torch.exp(logarithm - higher)
            total = part * share if total is None else total * faded + part * share
            weight, most = weight * faded + share, higher
            continue
        scores = (grouped @ keys_LKD.permute(1, 2, 0)).float().view(heads, count, -1) * rule.scaling
        scores = _bent(scores, rule).masked_fill(~mask_NL, float("-inf"))
        higher = torch.maximum(most, scores.amax(-1, keepdim=True))
        base = torch.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: keep exp away from inf - inf
        shares = torch.exp(scores - base)
        faded = torch.exp(most - base)
        part = shares.view(num_kv, -1, shares.shape[-1]).to(values_LKE.dtype) @ values_LKE.transpose(0, 1)
        part = part.float().view(heads, count, -1)
        total = part if total is None else total * faded + part
        weight = weight * faded + shares.sum(-1, keepdim=True)
        most = higher
    assert total is not None, "attention over nothing"
    return (total / weight).to(query_HND.dtype)


def is_fused(query_HND: torch.Tensor, value_width: int, rule: AttentionRule) -> bool:
    """Whether torch's fused kernel, which keeps no scores, gives such an attention with the logarithm of its weight."""
    width = query_HND.shape[-1]
    if not rule.is_plain or value_width != width:
        return False
    if query_HND.device.type == "cpu":
        return True
    fits = query_HND.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256
    return fits and torch.cuda.get_device_capability(query_HND.device) >= (8, 0)


def _fused(
    query_KND: torch.Tensor, keys_LKD: torch.Tensor, values_LKE: torch.Tensor, rule: AttentionRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention [K, N, E], logarithm of its weight [K, N]) where every token sees every key."""
    keys, values = (rows.transpose(0, 1)[None] for rows in (keys_LKD, values_LKE))
    ops, query = torch.ops.aten, query_KND[None]
    if query.device.type == "cpu":
        found = ops._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, False, scale=rule.scaling)
    else:
        found = ops._scaled_dot_product_flash_attention(query, keys, values, 0.0, False, False, scale=rule.scaling)
    return found[0][0], found[1][0].float()


def _bent(scores: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    return scores if rule.softcap is None else torch.tanh(scores / rule.softcap) * rule.softcap
