"""Attention over pages that the device reads in place: which tokens make a tile, and the launch for all of them.

Legend: N rows of a call, H query heads, K key heads, D, E widths of keys and values, T tiles.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from outcore.infer.attention.exact import AttentionRule
from outcore.infer.cache import KvStore, PassTables, Span
from outcore.infer.cache.tables import MixedTables, first_page

LONG_ROWS = 128
"""Rows of a product where a tile has many tokens: tokens times the query heads of a key head."""
LONG_BLOCK, SINGLE_BLOCK = 64, 64
"""Keys of a step, of tiles with many tokens and of single ones."""
SPLIT_KEYS = 256
"""Keys of a stretch of a single token's context. Stretches run beside each other; a fixed length, whatever else is in
the pass, keeps a token's bits."""
LEAST_ROWS = 16
"""Rows that the GPU multiplies at least."""
SINGLE_TOKENS = 8
"""Tokens that a sequence adds up to which each is a tile of its own: an answer's next one and its guesses. Where bits
may not depend on company the answer's tokens are, and no others."""


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether the device runs the kernel."""
    return (
        device.type == "cuda"
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (7, 5)
    )


@dataclass(frozen=True)
class TokenTiles:
    """Tiles of a call, on the device."""

    facts: torch.Tensor
    """int64 [5, T]: first row, tokens, position of the first, position of the first key in its table, the table's
    start in `pages`."""
    pages: torch.Tensor
    """int64: tables, one behind the other."""
    tokens: int
    """Tokens of a tile at most; 1: single ones, whose contexts are read in stretches."""
    most_keys: int
    """Keys that a tile sees at most."""


def cut_in_tiles(
    tables: PassTables, group: int, window: int | None, shares: int, most_single: int | None, device: torch.device
) -> list[TokenTiles]:
    """Tiles of a call: of single tokens, one each, and of prompts'. `shares`: query heads of a key head;
    `most_single`: single are so many tokens of a sequence behind others, or, None, an answer's."""
    cuts: tuple[tuple[list[Span], int], ...] = ([], 1), ([], max(1, LONG_ROWS // shares))
    for span in tables.spans:
        is_single = span.is_answer if most_single is None else span.start and span.count <= most_single
        cuts[0 if is_single else 1][0].append(span)
    return [tiles_of(tables, spans, group, window, tokens, device) for spans, tokens in cuts if spans]


def tiles_of(
    tables: PassTables, spans: Iterable[Span], group: int, window: int | None, tokens: int, device: torch.device
) -> TokenTiles:
    """Spans cut into tiles of up to so many tokens."""
    size = tables.page_tokens
    facts: list[tuple[int, int, int, int, int]] = []
    pages: list[int] = []
    most = 1
    for span in spans:
        first = first_page(span.start, window, size)
        for at in range(0, span.count, tokens):
            facts.append((span.row + at, min(tokens, span.count - at), span.start + at, first * size, len(pages)))
        own = span.pages.tables[group][first : -(-span.length // size)]
        pages += [max(page, 0) for page in own]  # passed ones are masked
        most = max(most, span.length if window is None else min(span.length, window + tokens))
    packed = tables.at(torch.tensor(facts).t().flatten(), device)
    return TokenTiles(packed.view(5, -1), tables.at(torch.tensor(pages), device), tokens, most)


def attend_tiles(
    store: KvStore, rule: AttentionRule, tiles: TokenTiles, query_HND: torch.Tensor, output_NHE: torch.Tensor
) -> None:
    """Fill the rows of `output_NHE` that the tiles name, after their keys and values are stored."""
    if query_HND.stride(2) != 1:
        query_HND = query_HND.contiguous()
    heads, _, width = query_HND.shape
    shape, (keys, values, scales) = store.shape, store.planes
    group, count = heads // shape.heads, tiles.facts.shape[1]
    is_single = tiles.tokens == 1
    split = SPLIT_KEYS if is_single else 0
    stretches = -(-tiles.most_keys // split) + (rule.window is not None) if split else 1
    tops = output_NHE.new_empty((stretches, count, heads, 2), dtype=torch.float32) if split else output_NHE
    sums = output_NHE.new_empty((stretches, count, heads, shape.value_width), dtype=torch.float32) if split else tops
    product_rows = max(LEAST_ROWS, _power(tiles.tokens * group))
    padded = {"D_PADDED": max(LEAST_ROWS, _power(width)), "E_PADDED": max(LEAST_ROWS, _power(shape.value_width))}
    wide = max(padded.values()) > 128 or query_HND.dtype == torch.float32
    sinks = output_NHE if rule.sinks_H is None else rule.sinks_H
    _kernels().attend_tiles[(count, shape.heads, stretches)](
        query_HND, keys, values, *(scales or (keys, values)), sinks, output_NHE, sums, tops, tiles.facts, tiles.pages,
        query_HND.stride(0), query_HND.stride(1), count, rule.scaling, rule.softcap or 1.0,
        PAGE=store.page_tokens, WINDOW=rule.window or 0, GROUP=group, KV_HEADS=shape.heads,
        D=width, E=shape.value_width, **padded, TOKENS=tiles.tokens, ROWS=product_rows,
        BLOCK=(SINGLE_BLOCK if is_single else LONG_BLOCK) // (2 if wide else 1), SPLIT=split,
        IN_8_BITS=store.is_packed, HAS_CAP=rule.softcap is not None, HAS_SINKS=rule.sinks_H is not None,
        num_warps=4 if product_rows < LONG_ROWS else 8, num_stages=2 if wide else 3,
    )  # fmt: skip
    if split:
        _kernels().merge[(count, heads)](
            sums, tops, sinks, output_NHE, tiles.facts, count, stretches, HEADS=heads, E=shape.value_width,
            E_PADDED=padded["E_PADDED"], HAS_SINKS=rule.sinks_H is not None, num_warps=1,
        )  # fmt: skip


def attend_mixed(
    store: KvStore,
    group: int,
    rule: AttentionRule,
    tables: MixedTables,
    query_HND: torch.Tensor,
    key_KND: torch.Tensor,
    value_KNE: torch.Tensor,
) -> torch.Tensor:
    """[N, H, E] over tables of one size; rows that nobody reads are zero."""
    store_rows(store, key_KND, value_KNE, tables.slots[group])
    heads, rows, _ = query_HND.shape
    output = query_HND.new_zeros((rows, heads, store.shape.value_width))
    most, pages = tables.size.single_keys, tables.pages[group]
    singles = TokenTiles(tables.singles[group], pages, 1, min(most, rule.window or most))
    for tiles in (singles, TokenTiles(tables.tiles[group], pages, tables.size.tile_tokens, 0)):
        attend_tiles(store, rule, tiles, query_HND, output)
    return output


def store_rows(store: KvStore, key_KND: torch.Tensor, value_KNE: torch.Tensor, slots_N: torch.Tensor) -> None:
    """Put the rows' keys and values into pages, in one launch where they are stored as they are."""
    if store.is_packed:
        store.write(key_KND.transpose(0, 1), value_KNE.transpose(0, 1), slots_N)
        return
    key_KND, value_KNE = (x if x.stride(2) == 1 else x.contiguous() for x in (key_KND, value_KNE))
    keys, values, _ = store.planes
    shape = store.shape
    _kernels().store_rows[(len(slots_N), shape.heads)](
        key_KND, value_KNE, keys, values, slots_N, *key_KND.stride()[:2], *value_KNE.stride()[:2],
        KV_HEADS=shape.heads, D=shape.key_width, E=shape.value_width,
        WIDTH=_power(max(shape.key_width, shape.value_width)), num_warps=1,
    )  # fmt: skip


def _kernels() -> Any:
    """The kernels, which only a GPU's machine imports."""
    from outcore.infer.attention import page_kernel

    return page_kernel


def _power(count: int) -> int:
    """The power of two that is not below."""
    return 1 << max(0, count - 1).bit_length()
