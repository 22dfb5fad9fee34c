"""Attention of single rows over tables at fixed addresses: what a CUDA graph can hold.

A row is one token of one sequence; tokens that a sequence adds together are rows that see one more each. Nothing here
depends on a value that the host knows, only on the sizes of the tables.
Legend: N rows, H query heads, K key heads, D, E widths of keys and values, L keys that a row may see.
"""

from __future__ import annotations

import torch

from outcore.infer.attention.exact import AttentionRule, attend_at_once
from outcore.infer.cache import KvStore, RowTables

GATHER_NUMEL = 1 << 26
"""Keys and values read back together at most: 256 MiB in fp32."""


def attend_rows(
    store: KvStore,
    group: int,
    rule: AttentionRule,
    tables: RowTables,
    query_HND: torch.Tensor,
    key_KND: torch.Tensor,
    value_KNE: torch.Tensor,
) -> torch.Tensor:
    """[N, H, E], after the rows' own keys and values are stored."""
    store.write(key_KND.transpose(0, 1), value_KNE.transpose(0, 1), tables.slots[group])
    pages, seen, device = tables.pages[group], tables.seen[group], query_HND.device
    width = store.shape.heads * (store.shape.key_width + store.shape.value_width)
    step = max(1, GATHER_NUMEL // (pages.shape[1] * store.page_tokens * width))
    found = []
    for at in range(0, tables.num_rows, step):
        keys, values = (x.to(query_HND.dtype) for x in store.read(pages[at : at + step], device))
        query = query_HND[:, at : at + step].transpose(0, 1).unsqueeze(2)
        part = attend_at_once(query, keys.transpose(1, 2), values.transpose(1, 2), seen[at : at + step], rule)
        found.append(part.squeeze(2))
    return found[0] if len(found) == 1 else torch.cat(found)
