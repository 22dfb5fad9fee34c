"""LoRA adapters side by side: each row of a call has its own, or none.

A linear layer holds the thin matrices of all its adapters as two: A [ranks of all, in], B [out, ranks of all]. What a
row's own adapter does not use is multiplied by zero between them, so the two products are those of one call whatever
its rows ask for. The scale comes behind them, in fp32, as peft has it: a row gets the numbers that it gets alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn

_numbers = itertools.count()


class RowChoice:
    """Tells the adapter of each row: numbers [N] by `source`, which is asked in every layer; 0 is the base alone.
    None: no row of the call has one."""

    def __init__(self) -> None:
        self.number, self.source = next(_numbers), _nobody
        _choices[self.number] = self

    def __deepcopy__(self, memo: Any) -> RowChoice:
        return self  # a layer that is copied for a trial asks the same


def _nobody() -> torch.Tensor | None:
    return None


_choices: WeakValueDictionary[int, RowChoice] = WeakValueDictionary()
"""Choices by number, because compiled code cannot hold an object."""


class RowAdapted(nn.Module):
    """Stands for a linear layer under adapters. `factors`: number of an adapter, A [rank, in], B [out, rank], scale."""

    def __init__(
        self,
        base_layer: nn.Module,
        factors: Sequence[tuple[int, torch.Tensor, torch.Tensor, float]],
        num_adapters: int,
        choice: RowChoice,
    ) -> None:
        super().__init__()
        self.base_layer, self.choice = base_layer, choice
        self.lora_A = nn.Parameter(torch.cat([down for _, down, _, _ in factors]), requires_grad=False)
        self.lora_B = nn.Parameter(torch.cat([up for _, _, up, _ in factors], 1), requires_grad=False)
        picks = torch.zeros(num_adapters + 1, len(self.lora_A), dtype=self.lora_A.dtype)
        scales = torch.zeros(num_adapters + 1, 1)
        at = 0
        for number, down, _, scale in factors:
            picks[number, at : at + len(down)] = 1
            scales[number] = scale
            at += len(down)
        self.lora_picks = nn.Parameter(picks, requires_grad=False)
        """1 for each rank that a row of an adapter uses, 0 where the rank is another's. A parameter, because layers
        that are alike share code and lend it their own; so are the scales."""
        self.lora_scales = nn.Parameter(_in_pieces(scales, self.lora_A.dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.base_layer(x)
        if torch.compiler.is_compiling():  # which rows are whose is known when the code runs
            return whole + row_adapted(
                x, self.lora_A, self.lora_B, self.lora_picks, self.lora_scales, self.choice.number
            )
        rows = self.choice.source()
        if rows is None:
            return whole
        return whole + _product(x, self.lora_A, self.lora_B, self.lora_picks, self.lora_scales, rows)


def _product(
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    picks: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    thin = F.linear(x.flatten(0, -2), down)
    if len(thin) != len(rows):
        raise RuntimeError(
            f"an adapted layer got {len(thin)} rows of a call of {len(rows)}: this model hands on some of its tokens "
            "only, and adapters of several requests cannot share its calls. Serve one adapter by --adapter."
        )
    added = F.linear(thin * picks[rows], up)
    return (added * scales[rows].float().sum(-1, keepdim=True)).to(x.dtype).view(*x.shape[:-1], len(up))


def _in_pieces(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Fp32 numbers [N, 1] as sums [N, 3] of numbers of a type: a layer's parameters are streamed in one type, and 16
    bits alone would lose 0.4 % of what is no power of two."""
    pieces: list[torch.Tensor] = []
    for _ in range(3):  # of 8 bits or more each, the 24 of an fp32 number
        pieces.append(numbers.to(dtype))
        numbers = numbers - pieces[-1].float()
    return torch.cat(pieces, 1)


@torch.library.custom_op("outcore::row_adapted", mutates_args=())
def row_adapted(
    x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, picks: torch.Tensor, scales: torch.Tensor, number: int
) -> torch.Tensor:
    """Compute what adapters add to outputs [.., out]: the choice of this number tells each row's adapter."""
    rows = _choices[number].source()
    if rows is None:
        return x.new_zeros((*x.shape[:-1], len(up)))
    return _product(x, down, up, picks, scales, rows)


@row_adapted.register_fake
def _(
    x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, picks: torch.Tensor, scales: torch.Tensor, number: int
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], len(up)))


def by_rows(model: nn.Module, names: list[str], head: nn.Module | None) -> RowChoice:
    """Have peft's adapters of these names, numbered from 1, computed row by row, in place. `head`: sees only some rows
    of a call. ValueError for an adapter that is more than two thin matrices."""
    from peft.tuners.lora import Linear, LoraLayer

    choice = RowChoice()
    adapted: list[tuple[str, Any]] = [(path, m) for path, m in model.named_modules() if isinstance(m, LoraLayer)]
    for path, module in adapted:
        if type(module) is not Linear or module.lora_variant or module.fan_in_fan_out or module is head:
            kind = "DoRA" if module.lora_variant else type(module).__name__
            raise ValueError(
                f"adapters side by side: {path} ({kind}) is no plain linear layer of the decoder's. Serve such an "
                "adapter alone, by --adapter."
            )
        own = [name for name in names if name in module.lora_A]
        if any(layer.bias is not None for name in own for layer in (module.lora_A[name], module.lora_B[name])):
            raise ValueError(f"adapters side by side: {path} has a bias of its own. Serve such an adapter alone.")
        factors: list[Any] = [
            (names.index(name) + 1, module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])
            for name in own
        ]
        above, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(above), leaf, RowAdapted(module.base_layer, factors, len(names), choice))
    return choice
