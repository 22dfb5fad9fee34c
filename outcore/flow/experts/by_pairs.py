"""A module's experts on pairs of a token and an expert: each matrix in one product of all pairs, not expert by expert.

`experts_by_pairs` is what transformers runs for experts of which a CPU multiplies packed ones as they are: two calls of
the kernels for a layer, which hand all chosen experts out together. Longer passes run expert by expert, as before.

Who multiplies which pair of a token and an expert: the GPU from a slot, the GPU from RAM over the link, or the CPU.

Both read RAM at once, each at its own rate, so of the pairs without a slot every `every`th is the GPU's (0: none), in
the order of the pairs; the CPU counts them alike (products.h: Stack)."""

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


WIDTH = 512
"""Results of a pair that one program collects."""


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels of that device are taken."""
    return device.type == "cuda"


def share_out(
    numbers: torch.Tensor, where: torch.Tensor, every: torch.Tensor, told: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot of each pair or -1, number of its expert where the GPU reads it in RAM or -1), int32 [P]. `numbers` [P]: of
    its expert, which `told` hears; `where` [experts]: their slots."""
    if has_kernels(numbers.device):
        numbers = numbers.contiguous()
        slots, links = (torch.empty(len(numbers), dtype=torch.int32, device=numbers.device) for _ in range(2))
        block = 1 << max(0, len(numbers) - 1).bit_length()
        _kernels().share_out[(1,)](
            numbers, where, every, told, slots, links, len(numbers), BLOCK=max(32, block), num_warps=1
        )
        return slots, links
    torch.add(numbers, 0, out=told[: len(numbers)])
    slots = where[numbers]
    misses = (slots < 0).int()
    is_linked = (misses > 0) & (every > 0) & (misses.cumsum(0) % every.clamp(min=1) == 0)
    return slots, torch.where(is_linked, numbers.int(), -1)


def collect(
    slots: torch.Tensor,
    links: torch.Tensor,
    in_slots: torch.Tensor,
    linked: torch.Tensor | None,
    of_cpu: torch.Tensor,
) -> torch.Tensor:
    """[P, results], in the type of `in_slots`, of each pair from who computed it."""
    if has_kernels(in_slots.device):
        out, (pairs, width) = torch.empty_like(in_slots), in_slots.shape
        grid = -(-width // WIDTH), pairs
        linked = in_slots if linked is None else linked
        _kernels().collect[grid](slots, links, in_slots, linked, of_cpu, out, width, BLOCK=WIDTH, num_warps=4)
        return out
    found = torch.where((slots < 0)[:, None], of_cpu, in_slots)
    return (found if linked is None else torch.where((links < 0)[:, None], found, linked)).to(in_slots.dtype)


def _kernels() -> Any:
    from outcore.flow.experts import pair_kernels

    return pair_kernels
