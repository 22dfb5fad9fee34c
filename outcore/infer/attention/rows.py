"""Attention of single rows over tables at fixed addresses: what a CUDA graph can hold.

A row is one token of one sequence; tokens that a sequence adds together are rows that see one more each. Nothing here
depends on a value that the host knows, only on the sizes of the tables.
Legend: N rows, H query heads, K key heads, D, E widths of keys and values, L keys that a row may see.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from outcore.infer.attention.exact import AttentionRule, Piece, attend_at_once, attend_in_pieces
from outcore.infer.attention.tiles import TokenTiles, attend_tiles, has_kernel, store_rows
from outcore.infer.cache import KvStore
from outcore.infer.cache.tables import RowTables
from outcore.sizing.inference import AttentionLimits


def attend_rows(
    store: KvStore,
    group: int,
    rule: AttentionRule,
    tables: RowTables,
    query_HND: torch.Tensor,
    key_KND: torch.Tensor,
    value_KNE: torch.Tensor,
    limits: AttentionLimits,
) -> torch.Tensor:
    """[N, H, E], after the rows' own keys and values are stored."""
    if has_kernel(query_HND.device):
        store_rows(store, key_KND, value_KNE, tables.slots[group])
        output = query_HND.new_empty((tables.num_rows, query_HND.shape[0], store.shape.value_width))
        most = tables.pages[group].shape[1] * store.page_tokens
        tiles = TokenTiles(tables.facts[group], tables.pages[group], 1, min(most, rule.window or most))
        attend_tiles(store, rule, tiles, query_HND, output)
        return output
    store.write(key_KND.transpose(0, 1), value_KNE.transpose(0, 1), tables.slots[group])
    pages, seen = tables.pages[group], tables.seen[group]
    wide = limits.gathered_pages(store.page_tokens * store.shape.width)
    step = wide // pages.shape[1]
    if step == 0:  # one row's keys and values are more than may lie beside the weights
        long = [
            attend_in_pieces(query_HND[:, at : at + 1], _pieces(store, pages[at], seen[at, 0], wide, query_HND), rule)
            for at in range(tables.num_rows)
        ]
        return torch.cat(long, 1).transpose(0, 1)
    mask = seen
    if rule.is_plain:
        mask = tables.bias(group, query_HND.shape[0] // store.shape.heads, query_HND.dtype)
    found = []
    for at in range(0, tables.num_rows, step):
        keys, values = read_like(query_HND, store, pages[at : at + step])
        query = query_HND[:, at : at + step].transpose(0, 1).unsqueeze(2)
        part = attend_at_once(query, keys.transpose(1, 2), values.transpose(1, 2), mask[at : at + step], rule)
        del keys, values  # before the next are read
        found.append(part.squeeze(2))
    return found[0] if len(found) == 1 else torch.cat(found)


def _pieces(
    store: KvStore, pages: torch.Tensor, seen_1L: torch.Tensor, wide: int, query_HND: torch.Tensor
) -> Iterator[Piece]:
    """(keys, values, which of them the row sees) of so many pages at a time."""
    size = store.page_tokens
    for at in range(0, len(pages), wide):
        yield (*read_like(query_HND, store, pages[at : at + wide]), seen_1L[:, at * size : (at + wide) * size])


def read_like(query: torch.Tensor, store: KvStore, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of pages, of the queries' type and on their device."""
    keys, values = store.read(pages, query.device)
    return keys.to(query.dtype), values.to(query.dtype)
