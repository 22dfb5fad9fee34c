"""Random mixes of chunks and single tokens in one pass: as a plain reference, and the same bits in any company."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from outcore.infer.attention import AttentionRule, PagedAttention
from outcore.infer.cache import CacheSettings, GroupPlan, KvCache, KvMemory, PassTables, Span
from outcore.staging.pool import SmallCopies


def one_case(seed, device, dtype, kv_format="same"):
    """(what attention gave, what it should give, what each sequence alone gave), of one random pass."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, shares = draw.choice([1, 2, 4]), draw.choice([1, 2, 3, 4, 8])
    width = draw.choice([16, 64, 80, 128, 192])
    value_width = draw.choice([width, 64])
    window = draw.choice([None, None, 1, 17, 100])
    heads, page = kv_heads * shares, draw.choice([16, 48, 64, 128])
    sinks = torch.randn(heads, device=device, dtype=dtype) if draw.random() < 0.3 else None
    rule = AttentionRule(width**-0.5, window, draw.choice([None, None, 30.0]), sinks)
    settings = CacheSettings((GroupPlan(window, 400),), page, dtype, kv_format, shares_prefixes=False)
    cache = KvCache(settings, KvMemory(device))
    attention, copies = PagedAttention(cache, is_deterministic=True), SmallCopies(device)
    try:
        lengths = [
            (
                draw.choice([0, 0, 1, page, draw.randint(1, 700)]),
                draw.choice([1, 1, 2, draw.randint(1, 90)]),
            )
            for _ in range(draw.randint(1, 5))
        ]
        kept, spans, row = [], [], 0
        for start, count in lengths:
            pages = cache.open([])
            cache.extend(pages, start + count)
            parts = [torch.randn(start + count, n, w, device=device).to(dtype) for n, w in
                     ((heads, width), (kv_heads, width), (kv_heads, value_width))]  # fmt: skip
            if start:
                run(attention, rule, [Span(pages, 0, start, 0)], page, copies, [part[:start] for part in parts])
            spans.append(Span(pages, start, count, row, is_answer=start > 0 and count <= 8))
            kept.append(parts)
            row += count
        new = [
            torch.cat([parts[i][-count:] for parts, (_, count) in zip(kept, lengths, strict=True)]) for i in range(3)
        ]
        together = run(attention, rule, spans, page, copies, new)
        alone = [
            run(attention, rule, [replace(s, row=0)], page, copies, [p[-s.count :] for p in parts])
            for s, parts in zip(spans, kept, strict=True)
        ]
        if device.type == "cuda":  # by the kernel, which gives a prompt the same bits however it was cut
            for s, parts, whole in zip(spans, kept, alone, strict=True):
                half = s.count // 2
                again = [
                    run(attention, rule, [replace(s, start=at, count=count, row=0)], page, copies,
                        [part[at : at + count] for part in parts])
                    for at, count in ((s.start, half), (s.start + half, s.count - half)) if count
                ]  # fmt: skip
                assert torch.equal(torch.cat(again), whole)
        expected = [plain(parts, s.start, rule, shares) for s, parts in zip(spans, kept, strict=True)]
        return together, torch.cat(expected), torch.cat(alone)
    finally:
        attention.close()


def run(attention, rule, spans, page, copies, parts):
    """[N, H, E] of one call: `parts` are its queries, keys and values [N, heads, width]."""
    attention.begin([PassTables(spans, page, copies)])
    return attention.attend(rule, *(part.transpose(0, 1) for part in parts))


def plain(parts, start, rule, shares):
    """[n, H, E] in fp64, of the tokens from `start` on."""
    query, keys, values = (part.double() for part in parts)
    keys, values = keys.repeat_interleave(shares, 1), values.repeat_interleave(shares, 1)
    scores = torch.einsum("nhd,lhd->hnl", query[start:], keys) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    at = torch.arange(start, len(query), device=query.device)[:, None]
    key = torch.arange(len(query), device=query.device)[None]
    seen = key <= at if rule.window is None else (key <= at) & (key > at - rule.window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if rule.sinks_H is not None:
        sink = rule.sinks_H.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sink), -1)
    return torch.einsum("hnl,lhe->nhe", scores.softmax(-1)[..., : len(query)], values)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(10))
def test_any_mix_equals_a_plain_reference(device, seed):
    found, expected, alone = one_case(seed, torch.device(device), torch.float32)
    assert (found - expected).abs().max() < 1e-5
    assert torch.equal(found, alone)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(100, 106))
@pytest.mark.parametrize("kv_format, error", [("same", 0.01), ("int8", 0.03)])
def test_in_bf16_and_with_8_bit_pages(seed, kv_format, error):
    found, expected, alone = one_case(seed, torch.device("cuda:0"), torch.bfloat16, kv_format)
    assert (found.double() - expected).norm() < error * expected.norm()
    assert torch.equal(found, alone)
