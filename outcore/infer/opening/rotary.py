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

from outcore.model import LoadedModel
from outcore.model.forward import unwrap


@torch.no_grad()
def fix_factors(loaded: LoadedModel, context_tokens: int, progress: Callable[[str], None]) -> None:
    """Have the model turn all texts by one set of factors, the one for texts of `context_tokens`."""
    short = loaded.facts.short_positions
    if short is None:
        return
    if context_tokens > short:
        progress(
            f"rotary factors: those for texts beyond {short:,} tokens, for all; shorter ones differ a little from what "
            f"they are by themselves (--context {short}: those for short texts)"
        )
    for module in unwrap(loaded.model).modules():
        if hasattr(module, "original_inv_freq") and not _settle(module, context_tokens - 1):
            _see_last(module, context_tokens - 1)


def _settle(rotary: Any, last: int) -> bool:
    """Have the module keep the factors that a text up to `last` gets, without a look at positions, for which a CUDA
    graph could not wait. False, and as it was, where its tables do not follow from what it keeps (PhiMoE)."""
    places = torch.tensor([[0, 1, last]], device=rotary.inv_freq.device)
    x = torch.zeros(1, device=places.device)
    wanted, kind = rotary(x, places), rotary.rope_type
    rotary.rope_type = "settled"
    if all(torch.equal(found, table[:, :2]) for found, table in zip(rotary(x, places[:, :2]), wanted, strict=True)):
        return True
    rotary.rope_type = kind
    return False


def _see_last(rotary: Any, last: int) -> None:
    """Have the module see a position more, which decides on the factors and whose own tables are left out."""
    tables_of = rotary.forward

    def with_last(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **more: Any) -> tuple[torch.Tensor, ...]:
        seen = torch.cat([position_ids, torch.full_like(position_ids[:, :1], last)], 1)  # [B, T + 1]
        return tuple(table[:, :-1] for table in tables_of(x, seen, *args, **more))

    rotary.forward = with_last
