"""Attention over pages in Triton: any mix of prompts' chunks and single tokens in one launch, nothing gathered.
Imported on a GPU only; `exact.py` says the same in torch.

A *tile* is a few neighbouring tokens of one sequence. A program takes one tile and one key head, with all query heads
that share it, and walks over the sequence's pages. Where it begins and how it cuts keys into blocks follows from the
token's own position, so a token's bits do not depend on what else is in the pass.
Legend: D, E widths of keys and values, K key heads, H query heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_tiles"])
def attend_tiles(
    query, keys, values, key_scales, value_scales, sinks, out, sums, tops, tiles, pages,
    query_head_stride, query_row_stride, num_tiles, scaling, softcap,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, D_PADDED: tl.constexpr, E_PADDED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    IN_8_BITS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One tile and key head; with SPLIT one stretch of so many keys, whose part `merge` adds up. `tiles`: int64
    [5, tiles]: first row, tokens, position of the first, position of the table's first key, start of the table in
    `pages`. Programs: (tiles, key heads, stretches)."""
    tile, head, stretch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tiles + tile)
    count = tl.load(tiles + num_tiles + tile).to(tl.int32)
    start = tl.load(tiles + 2 * num_tiles + tile).to(tl.int32)
    first = tl.load(tiles + 3 * num_tiles + tile).to(tl.int32)
    table = pages + tl.load(tiles + 4 * num_tiles + tile)
    at = tl.arange(0, ROWS)
    token, share = at // GROUP, at % GROUP
    is_row = token < tl.minimum(count, TOKENS)
    position = start + token
    of_head = (head * GROUP + share).to(tl.int64)
    d, e = tl.arange(0, D_PADDED), tl.arange(0, E_PADDED)
    asked = tl.load(
        query + of_head[:, None] * query_head_stride + (row + token)[:, None] * query_row_stride + d[None, :],
        is_row[:, None] & (d < D)[None, :],
        0.0,
    )
    end = start + count  # behind the last key that any of its tokens sees
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, start - WINDOW + 1) // BLOCK * BLOCK
    if SPLIT > 0:
        begin = begin + stretch * SPLIT
        end = tl.minimum(end, begin + SPLIT)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, E_PADDED], tl.float32)
    for block in range(begin, end, BLOCK):
        key = block + tl.arange(0, BLOCK)
        is_key = (key >= first) & (key < end)
        if PAGE % BLOCK == 0:  # the whole block lies in one page
            page = tl.load(table + tl.maximum(block - first, 0) // PAGE)
            slot = page * PAGE + block % PAGE + tl.arange(0, BLOCK)
        else:
            page = tl.load(table + tl.maximum(key - first, 0) // PAGE, is_key, 0)
            slot = page * PAGE + key % PAGE
        line = slot * KV_HEADS + head
        seen = tl.load(keys + line[None, :] * D + d[:, None], is_key[None, :] & (d < D)[:, None], 0.0)
        if IN_8_BITS:
            seen = (seen.to(tl.float32) * tl.load(key_scales + line, is_key, 0.0)[None, :]).to(asked.dtype)
        score = tl.dot(asked, seen, input_precision="ieee") * scaling
        if HAS_CAP:
            bent = score / softcap
            score = softcap * (2 * tl.sigmoid(2 * bent) - 1)
        visible = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        score = tl.where(visible, score * LOG2_E, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: no inf - inf
        faded = tl.exp2(top - base)
        likely = tl.exp2(score - base[:, None])
        weight = weight * faded + tl.sum(likely, 1)
        given = tl.load(values + line[:, None] * E + e[None, :], is_key[:, None] & (e < E)[None, :], 0.0)
        if IN_8_BITS:
            given = (given.to(tl.float32) * tl.load(value_scales + line, is_key, 0.0)[:, None]).to(asked.dtype)
        total = total * faded[:, None] + tl.dot(likely.to(given.dtype), given, input_precision="ieee")
        top = higher
    line_out = (row + token) * (KV_HEADS * GROUP) + of_head
    if SPLIT > 0:  # tiles of one token: parts lie by tile
        part = (stretch.to(tl.int64) * num_tiles + tile + token) * (KV_HEADS * GROUP) + of_head
        tl.store(tops + 2 * part, top, is_row)
        tl.store(tops + 2 * part + 1, weight, is_row)
        is_seen = is_row & (top > float("-inf"))
        tl.store(sums + part[:, None] * E + e[None, :], total, is_seen[:, None] & (e < E)[None, :])
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + of_head).to(tl.float32) * LOG2_E
            higher = tl.maximum(top, sink)
            faded = tl.exp2(top - higher)
            weight = weight * faded + tl.exp2(sink - higher)
            total = total * faded[:, None]
        found = (total / weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + line_out[:, None] * E + e[None, :], found, is_row[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["num_tiles", "num_stretches"])
def merge(
    sums, tops, sinks, out, tiles, num_tiles, num_stretches,
    HEADS: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The stretches of one tile of one token and query head, in their order; those that saw nothing add nothing.
    Programs: (tiles, query heads)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    if tl.load(tiles + num_tiles + tile) == 0:  # an empty tile
        return
    line = tl.load(tiles + tile) * HEADS + head
    e = tl.arange(0, E_PADDED)
    top = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    total = tl.zeros([E_PADDED], tl.float32)
    part = tile.to(tl.int64) * HEADS + head
    for _ in range(num_stretches):
        own = tl.load(tops + 2 * part)
        if own > float("-inf"):
            higher = tl.maximum(top, own)
            faded, rate = tl.exp2(top - higher), tl.exp2(own - higher)
            weight = weight * faded + tl.load(tops + 2 * part + 1) * rate
            total = total * faded + tl.load(sums + part * E + e, e < E, 0.0) * rate
            top = higher
        part += num_tiles * HEADS
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        higher = tl.maximum(top, sink)
        faded = tl.exp2(top - higher)
        weight = weight * faded + tl.exp2(sink - higher)
        total = total * faded
    tl.store(out + line * E + e, (total / weight).to(out.dtype.element_ty), e < E)


@triton.jit
def store_rows(
    keys, values, into_keys, into_values, slots,
    key_head_stride, key_row_stride, value_head_stride, value_row_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Keys and values of a row into its slot; a slot below 0 stands for none. Programs: (rows, key heads)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, WIDTH)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    line = slot * KV_HEADS + head
    key = tl.load(keys + head * key_head_stride + row * key_row_stride + at, at < D, 0.0)
    tl.store(into_keys + line * D + at, key, at < D)
    value = tl.load(values + head * value_head_stride + row * value_row_stride + at, at < E, 0.0)
    tl.store(into_values + line * E + at, value, at < E)
