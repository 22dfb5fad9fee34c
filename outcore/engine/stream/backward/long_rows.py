"""Backward of a layer on rows so long that all but its attention goes in tiles of tokens (`flow/layers/long_rows`).

The layer is recomputed up to its attention in tiles, and attention once, whose graph is kept. Then back: each tile from
attention's result on, which gives that result's gradient; each group of heads through its attention, whose queries,
keys and values make room for their gradients; each tile from those to its input. Parameters' gradients are added up
over tiles. Held of whole rows, beside input and gradient: queries, keys, values, attention's result and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.func import vjp

from outcore.engine.stream.gradients.accumulator import GradAccumulator
from outcore.flow.layers import AFTER, BEFORE, HeadGroup, LayerForward, LongRows, Role
from outcore.flow.parts import LayerCall

BEFORE_BACK, AFTER_BACK = "before attention, backward", "after attention, backward"


def register_backward(rows: LongRows) -> None:
    """Have tiles' backward compiled: gradients by the input and, after attention, by its result; those of the trained
    parameters are added to sums."""
    assert rows.compiled is not None
    for role, back_role in ((BEFORE, BEFORE_BACK), (AFTER, AFTER_BACK)):
        rows.compiled.register(back_role, partial(_backward_of, rows.roles[role]))


def _backward_of(role: Role, forward: LayerForward, trainable: Sequence[bool]) -> Callable[..., Any]:
    run_tile = role(forward, trainable)

    def backward(
        tensors: list[torch.Tensor], hidden: torch.Tensor, args: tuple, kwargs: dict, *more: Any
    ) -> Sequence[torch.Tensor]:
        *given, grad, sums = more
        frozen = [t for t, wanted in zip(tensors, trainable, strict=True) if not wanted]
        wanted = [t for t, is_wanted in zip(tensors, trainable, strict=True) if is_wanted]

        def run(wanted: list[torch.Tensor], *inputs: torch.Tensor) -> Any:
            return run_tile([*wanted, *frozen], inputs[0], args, kwargs, *inputs[1:])  # slots: trainable ones first

        grads, *found = vjp(run, wanted, hidden, *given)[1](grad)
        for total, part in zip(sums, grads, strict=True):
            total.add_(part)
        return found

    return backward


def backward_long_rows(
    rows: LongRows,
    index: int,
    weights: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]],
    hidden: torch.Tensor,
    call: LayerCall,
    grad: torch.Tensor,
    into: GradAccumulator | None,
) -> torch.Tensor:
    """Gradient of the layer's input, in the memory of `grad`, that of its output. `weights`: the layer's parameters;
    the same as leaves; those of these that are trained, whose gradients are added to `into`."""
    tensors, leaves, trainable = weights
    groups, asked = rows.before_attention(index, tensors, hidden, call)
    with torch.enable_grad():
        for group in groups:
            for part in (group.query, group.key, group.value):
                part.requires_grad_()
            group.result = asked.of(group)
    grad_results = [torch.empty_like(group.result) for group in groups if group.result is not None]

    def back(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]):
        found = torch.autograd.grad(outputs, [*inputs, *trainable], grads, allow_unused=True)
        if into is not None:
            into.add(found[len(inputs) :])
        return found[: len(inputs)]

    def sums() -> Sequence[torch.Tensor]:
        return into.sums() if into is not None else []

    for tile in rows.tiles(hidden.detach(), call):
        result = rows.results_of(groups, tile.tokens).detach()
        made = rows.run_compiled(AFTER_BACK, index, tile, tensors, result, grad[:, tile.tokens], sums())
        if made is None:
            result.requires_grad_()
            tile.hidden.requires_grad_()
            with torch.enable_grad():
                output = rows.after(index, tile, leaves, result)
            made = back([output], [tile.hidden, result], [grad[:, tile.tokens]])
        grad_x, grad_result = made
        assert grad_result is not None
        for home, piece in zip(grad_results, grad_result.chunk(len(groups), dim=2), strict=True):
            home[:, tile.tokens] = piece
        grad[:, tile.tokens] = 0.0 if grad_x is None else grad_x
    for group in groups:
        _through_attention(group, grad_results.pop(0))
    for tile in rows.tiles(hidden.detach(), call):
        gradients = [
            torch.cat([part[:, :, tile.tokens] for part in parts], dim=1)
            for parts in zip(*((group.query, group.key, group.value) for group in groups), strict=True)
        ]
        made = rows.run_compiled(BEFORE_BACK, index, tile, tensors, gradients, sums())
        if made is None:
            tile.hidden.requires_grad_()
            with torch.enable_grad():
                parts, _ = rows.before(index, tile, leaves)
            made = back(parts, [tile.hidden], gradients)
        (grad_x,) = made
        if grad_x is not None:
            grad[:, tile.tokens] += grad_x
    return grad


def _through_attention(group: HeadGroup, grad: torch.Tensor) -> None:
    """Gradients in the place of queries, keys and values; attention's result is let go."""
    assert group.result is not None
    parts = [group.query, group.key, group.value]
    group.query, group.key, group.value = torch.autograd.grad(group.result, parts, grad)
    group.result = None
