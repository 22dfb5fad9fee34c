"""Attention over pages gives what attention over whole rows gives, however it is cut."""

import pytest
import torch

from outcore.infer.attention import (
    AttentionRule,
    PagedAttention,
    attend_at_once,
    attend_in_pieces,
    causal_mask,
    is_fused,
)
from outcore.infer.cache import PassTables, SequencePages, Span
from outcore.staging.pool import SmallCopies

H, K, D, E = 4, 2, 8, 6
RULES = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks_H": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "all": {"window": 4, "softcap": 5.0, "sinks_H": torch.tensor([0.3, -1.0, 2.0, 0.0])},
}


def reference(query, keys, values, start, rule):
    """By the definition, head by head, in fp64."""
    out = torch.zeros(H, query.shape[1], E, dtype=torch.float64)
    for h in range(H):
        for n in range(query.shape[1]):
            at = start + n
            first = 0 if rule.window is None else max(0, at - rule.window + 1)
            scores = (keys[first : at + 1, h // (H // K)].double() @ query[h, n].double()) * rule.scaling
            if rule.softcap:
                scores = torch.tanh(scores / rule.softcap) * rule.softcap
            weights = torch.exp(scores - scores.max())
            total = weights.sum()
            if rule.sinks_H is not None:
                total = total + torch.exp(rule.sinks_H[h].double() - scores.max())
            out[h, n] = (weights / total) @ values[first : at + 1, h // (H // K)].double()
    return out


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("start, count", [(0, 11), (9, 2), (20, 1)])
def test_at_once_and_in_pieces(name, start, count):
    torch.manual_seed(start)
    rule = AttentionRule(0.3, **RULES[name])
    length = start + count
    query, keys, values = torch.randn(H, count, D), torch.randn(length, K, D), torch.randn(length, K, E)
    expected = reference(query, keys, values, start, rule)
    zero, at = torch.zeros(1, dtype=torch.long), torch.tensor([start])
    mask = causal_mask(at, count, zero, length, rule.window)
    whole = attend_at_once(query[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], mask, rule)[0]
    assert torch.allclose(whole.double(), expected, atol=1e-5)
    for step in (1, 3, 50):
        pieces = (
            (keys[i : i + step], values[i : i + step], mask[0, 0][:, i : i + step]) for i in range(0, length, step)
        )
        assert torch.allclose(attend_in_pieces(query, pieces, rule).double(), expected, atol=1e-5)


@pytest.mark.parametrize("cut", [2, 7])
def test_pieces_that_all_tokens_see_are_fused(cut):
    torch.manual_seed(cut)
    rule = AttentionRule(0.3)
    query, keys, values = torch.randn(H, 3, D), torch.randn(12, K, D), torch.randn(12, K, D)
    zero, at = torch.zeros(1, dtype=torch.long), torch.tensor([9])
    mask = causal_mask(at, 3, zero, 12, None)[0, 0]
    expected = attend_in_pieces(query, [(keys, values, mask)], rule)
    assert is_fused(query, D, rule) and not is_fused(query, E, rule)
    assert not is_fused(query, D, AttentionRule(0.3, softcap=2.0))
    pieces = [(keys[:cut], values[:cut], None), (keys[cut:9], values[cut:9], None), (keys[9:], values[9:], mask[:, 9:])]
    assert torch.allclose(attend_in_pieces(query, pieces, rule), expected, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("window", [None, 5])
def test_sequences_that_begin_together_do_not_see_each_other(device, window):
    """Neighbours go at once where the GPU has a kernel for that; rows of others, and rows that pad, stay zero."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    starts, counts = (0, 0, 9, 0), (11, 1, 3, 40)
    rows = [sum(counts[:i]) for i in range(5)]
    spans = [Span(SequencePages([]), *of_span) for of_span in zip(starts, counts, rows[:4], strict=True)]
    torch.manual_seed(0)
    query, key, value = (torch.randn(n, rows[4] + 2, D) for n in (H, K, K))
    rule, attention = AttentionRule(0.3, window), PagedAttention(None)
    try:
        attention.begin([PassTables(spans, 1, SmallCopies(torch.device(device)))])
        found = attention.attend(rule, *(x.to(device, dtype) for x in (query, key, value))).float().cpu()
    finally:
        attention.close()
    expected = torch.zeros(rows[4] + 2, H, D)
    for start, count, row in zip(starts, counts, rows, strict=False):
        if start == 0:
            here = slice(row, row + count)
            zero = torch.zeros(1, dtype=torch.long)
            mask = causal_mask(zero, count, zero, count, window)
            expected[here] = attend_at_once(*(x[None, :, here] for x in (query, key, value)), mask, rule)[0].transpose(
                0, 1
            )
    assert torch.allclose(found, expected, atol=0.03 if device == "cuda" else 1e-5)
    assert not found[12:15].any() and not found[rows[4] :].any()
