"""Rotary factors that follow a text's length (LongRoPE: Phi 3.5, Phi 4 mini): one set for all texts of an opened model.

Such a model turns texts up to a length by short factors and longer ones by long factors, and takes those that the
longest text of a call needs. Texts that share a pass would change each other, and pages would be of another set than
who finds them again. So the context decides, once: up to that length all texts have the short factors, as each has by
itself; beyond it all have the long ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outcore.model import LoadedModel
from outcore.model.forward import unwrap


def fix_factors(loaded: LoadedModel, context_tokens: int, progress: Callable[[str], None]) -> None:
    """Have the model turn all texts by one set of factors, the one for texts of `context_tokens`."""
    short = loaded.facts.short_positions
    if short is None or context_tokens <= short:
        return
    progress(
        f"rotary factors: those for texts beyond {short:,} tokens, for shorter ones too, which differ a little from "
        f"what they are by themselves (--context {short}: those for short texts)"
    )
    for module in unwrap(loaded.model).modules():
        if hasattr(module, "original_inv_freq"):
            _see_last(module, context_tokens - 1)


def _see_last(rotary: nn.Module, last: int) -> None:
    """Have the module see a position more, which decides on the factors and whose own tables are left out."""
    tables_of = rotary.forward

    def with_last(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **more: Any) -> tuple[torch.Tensor, ...]:
        seen = torch.cat([position_ids, torch.full_like(position_ids[:, :1], last)], 1)  # [B, T + 1]
        return tuple(table[:, :-1] for table in tables_of(x, seen, *args, **more))

    rotary.forward = with_last
