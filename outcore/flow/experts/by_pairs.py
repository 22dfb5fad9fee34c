"""A module's experts on pairs of a token and an expert: each matrix in one product of all pairs, not expert by expert.

`experts_by_pairs` is what transformers runs for experts of which a CPU multiplies packed ones as they are: two calls of
the kernels for a layer, which hand all chosen experts out together. Longer passes run expert by expert, as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from outcore.flow.weights import PackedWeight

NAME = "outcore_by_pairs"
"""Name of `experts_by_pairs` in a model's configuration."""


def run_pairs(
    module: Any,
    hidden: torch.Tensor,
    choice: torch.Tensor,
    weights: torch.Tensor,
    product: Callable[[str, torch.Tensor], torch.Tensor],
    bias: Callable[[str], torch.Tensor | None],
) -> torch.Tensor:
    """hidden [N, H], choice [N, K], weights [N, K] -> [N, H]. `product(name, rows)`: rows [N or P, columns] times the
    matrix of that name that each pair chose, [P, results]; `bias(name)`: theirs [P, results], if they have one."""

    def linear(name: str, rows: torch.Tensor) -> torch.Tensor:
        values, own = product(name, rows), bias(name)
        return values if own is None else values + own

    values = linear(first_matrix(module), hidden)
    values = linear("down_proj", module._apply_gate(values) if module.has_gate else module.act_fn(values))
    if getattr(module, "has_post_expert_norm", False):
        values = module.post_expert_norm(values)
    weighted = values * weights.reshape(-1, 1)
    return weighted.view(*choice.shape, -1).sum(dim=1).to(hidden.dtype)


def first_matrix(module: Any) -> str:
    """Name of what a token is multiplied with first."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def experts_by_pairs(module: Any, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
    """hidden [N, H], choice [N, K], weights [N, K] -> [N, H], in whatever way the model's code gives them."""
    hidden, choice, weights = (*args, *named.values())
    numbers = choice.reshape(-1)
    stacks = [getattr(module, name, None) for name in (first_matrix(module), "down_proj")]
    if not all(
        isinstance(stack, PackedWeight)
        and stack.spec.is_transposed == module.is_transposed
        and stack.products.takes_pairs(stack, len(hidden), len(numbers))
        for stack in stacks
    ):
        return type(module).forward.__wrapped__(module, hidden, choice, weights)
    return run_pairs(
        module,
        hidden,
        choice,
        weights,
        lambda name, rows: getattr(module, name).chosen(rows, numbers),
        lambda name: getattr(module, f"{name}_bias")[numbers] if module.has_bias else None,
    )


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_by_pairs)
