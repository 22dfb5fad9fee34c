"""Backward of the embedding and of layers with recomputation, on one micro-batch with weights from a device slab.

A layer is recomputed from its saved input, and autograd is asked for the gradients of exactly its input and parameters.
Compiled, both are one graph (a vector-Jacobian product), so the compiler drops what no gradient needs, such as the
layer's last matrix product. The balancing loss of a mixture of experts mixes all layers, so its gradient with respect
to each layer's router logits is taken at the head (`head`) and joined in when that layer runs backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.func import vjp

from outcore.engine.stream.backward.long_rows import backward_long_rows, register_backward
from outcore.engine.stream.gradients.download import GradAccumulator
from outcore.flow.layers import Batch, LayerForward, PartRunner, in_place
from outcore.flow.parts import LayerCall

ROLE = "recompute_backward"


def recompute_backward(forward: LayerForward, trainable: Sequence[bool]) -> Callable[..., torch.Tensor]:
    """The role's function: gradient of the input; those of the trainable parameters are added to `sums`."""

    def backward(
        tensors: list[torch.Tensor],
        hidden: torch.Tensor,
        args: tuple,
        kwargs: dict,
        grad: torch.Tensor,
        sums: list[torch.Tensor],
    ) -> torch.Tensor:
        frozen = [t for t, wanted in zip(tensors, trainable, strict=True) if not wanted]
        wanted = [t for t, is_wanted in zip(tensors, trainable, strict=True) if is_wanted]

        def run(wanted: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return forward([*wanted, *frozen], x, args, kwargs)  # slots have the trainable ones first

        pull = vjp(run, wanted, hidden)[1]
        grads, grad_x = pull(grad)
        for total, part in zip(sums, grads, strict=True):
            total.add_(part)
        return grad_x

    return backward


class BackwardRunner:
    """Backward of what `runner` runs forward."""

    def __init__(self, runner: PartRunner) -> None:
        self.runner, self.units, self.weights = runner, runner.units, runner.weights
        self._compiled = runner.compiled
        if self._compiled is not None:
            self._compiled.register(ROLE, recompute_backward)
        if runner.long_rows is not None and runner.long_rows.compiled is not None:
            register_backward(runner.long_rows)

    def embed(self, slab: torch.Tensor, batch: Batch, grad: torch.Tensor, into: GradAccumulator) -> None:
        """Add the gradients of the embedding's parameters for `grad` of its output."""
        leaves, trainable = self.weights.leaves(self.units.embed, slab)
        with torch.enable_grad(), in_place(self.units.embed, leaves):
            hidden = self.units.record(batch, with_masks=False).hidden
        if not hidden.requires_grad:  # where only a tied head's own parameters are trained
            return
        edge = torch.autograd.graph.get_gradient_edge(hidden)
        if (long_rows := self.runner.takes_long(hidden)) is not None:
            del hidden  # its numbers are not needed, and the gradient takes as much
            grad = long_rows.homes.up(grad)
        tiles = self.weights.tiles_of(self.units.embed)
        anchors = [] if tiles is None else tiles.anchors(self.units.embed)
        found = torch.autograd.grad(edge, [*anchors, *trainable], grad, allow_unused=True)
        into.add(found[len(anchors) :])

    def layer(
        self,
        index: int,
        slab: torch.Tensor,
        hidden: torch.Tensor,
        call: LayerCall,
        grad: torch.Tensor,
        grad_routers: Sequence[torch.Tensor],
        into: GradAccumulator | None,
    ) -> torch.Tensor:
        """Gradient of the layer's input; those of its parameters are added to `into` (None: it has none to train)."""
        unit, compiled = self.units.layer_units[index], self._compiled
        if (tiles := self.weights.tiles_of(unit)) is not None:
            tiles.begin_backward(unit)
        elif (long_rows := self.runner.takes_long(hidden)) is not None:
            tensors, leaves = self.weights.tensors(unit, slab), self.weights.leaves(unit, slab)
            return backward_long_rows(long_rows, index, (tensors, *leaves), hidden, call, grad, into)
        elif compiled is not None and compiled.is_active(index):
            sums = into.sums() if into is not None else []
            found = compiled.run(ROLE, index, self.weights.tensors(unit, slab), hidden, call, grad, sums)
            if found is not None:
                return found
        elif compiled is not None and compiled.has_eager_graphs(index):
            sums = into.sums() if into is not None else []
            function = partial(self._as_graph, slab=slab)
            return compiled.eager(ROLE, index, function, self.weights.tensors(unit, slab), hidden, call, grad, sums)
        leaves, trainable = self.weights.leaves(unit, slab)
        x = hidden.detach().requires_grad_()
        with torch.enable_grad():
            output, routers = self.runner.apply_layer(index, leaves, x, call)
        outputs, grads = [output], [grad]
        for logits, grad_logits in zip(routers, grad_routers, strict=True):
            if logits.requires_grad:
                outputs.append(logits)
                grads.append(grad_logits)
        grad_x, *found = torch.autograd.grad(outputs, [x, *trainable], grads, allow_unused=True)
        if into is not None:
            into.add(found)
        return grad_x

    def _as_graph(
        self,
        index: int,
        tensors: list[torch.Tensor],
        hidden: torch.Tensor,
        args: tuple,
        kwargs: dict,
        grad: torch.Tensor,
        sums: list[torch.Tensor],
        *,
        slab: torch.Tensor,
    ) -> torch.Tensor:
        """`layer` as a graph takes it; `tensors` are views of `slab`."""
        leaves, trainable = self.weights.leaves(self.units.layer_units[index], slab)
        x = hidden.detach().requires_grad_()
        with torch.enable_grad():
            output, _ = self.runner.apply_layer(index, leaves, x, LayerCall(args, kwargs))
        grad_x, *found = torch.autograd.grad(output, [x, *trainable], grad, allow_unused=True)
        for total, part in zip(sums, found, strict=True):
            if part is not None:
                total.add_(part)
        return grad_x
