"""Who multiplies which pair of a token and an expert: the GPU from a slot, the GPU from RAM over the link, or the CPU.

Both read RAM at once, each at its own rate, so of the pairs without a slot every `every`th is the GPU's (0: none), in
the order of the pairs; the CPU counts them alike (products.h: Stack)."""

from __future__ import annotations

from typing import Any

import torch

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
