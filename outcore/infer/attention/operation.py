"""Paged attention as one operation of torch, which the compiler does not look into.

Where a pass is, and which pages it reads, is known when compiled code runs, not when it is made."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from outcore.infer.attention.exact import AttentionRule


class Attention(Protocol):
    """Protocol of an attention that knows where the pass is."""

    def attend(
        self, rule: AttentionRule, query_HND: torch.Tensor, key_KND: torch.Tensor, value_KNE: torch.Tensor
    ) -> torch.Tensor: ...


opened: WeakValueDictionary[int, Attention] = WeakValueDictionary()
"""Attentions by number: compiled code cannot hold an object, so it names the attention that it means."""


@torch.library.custom_op("outcore::paged_attention", mutates_args=())
def paged_attention(
    query_HND: torch.Tensor,
    key_KND: torch.Tensor,
    value_KNE: torch.Tensor,
    number: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """[N, H, E] by the attention of this number."""
    rule = AttentionRule(scaling, window, softcap, sinks_H)
    return opened[number].attend(rule, query_HND, key_KND, value_KNE).contiguous()


@paged_attention.register_fake
def _(query_HND: torch.Tensor, key_KND: torch.Tensor, value_KNE: torch.Tensor, *_: Any) -> torch.Tensor:
    heads, rows, _width = query_HND.shape
    return query_HND.new_empty((rows, heads, value_KNE.shape[2]))
