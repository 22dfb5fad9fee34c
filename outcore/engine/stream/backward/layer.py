"""Backward of the embedding and of layers with recomputation, on one micro-batch with weights from a device slab.

A layer is recomputed from its saved input, and autograd is asked for the gradients of exactly its input and parameters.
Compiled, both are one graph (a vector-Jacobian product), so the compiler drops what no gradient needs, such as the
layer's last matrix product. The balancing loss of a mixture of experts mixes all layers, so its gradient with respect
to each layer's router logits is taken at the head (`head`) and joined in when that layer runs backward.

Backward of a layer on rows so long that all but its attention goes in tiles of tokens (`flow/layers/long_rows`).

The layer is recomputed up to its attention in tiles, and attention once, group by group of heads; of that autograd
keeps what has no home in RAM. Then back: each tile from attention's result on, which gives that result's gradient; each
group of heads through its attention, whose queries, keys and values make room for their gradients; each tile from those
to its input. Parameters' gradients are added up over tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.func import vjp

from outcore.engine.stream.gradients.download import GradAccumulator
from outcore.flow.layers import Attending, Batch, LongRows, PartRunner, Role, in_place
from outcore.flow.parts import LayerCall

BEFORE_BACK, AFTER_BACK = "before attention, backward", "after attention, backward"


def register_backward(rows: LongRows) -> None:
    """Have tiles' backward compiled: gradients by the input and, after attention, by its result; those of the trained
    parameters are added to sums."""
    assert rows.compiled is not None
    for role, back_role in ((rows.BEFORE, BEFORE_BACK), (rows.AFTER, AFTER_BACK)):
        rows.compiled.register(back_role, partial(_backward_of, rows.roles[role]))


def _backward_of(role: Role, forward: Callable[..., torch.Tensor], trainable: Sequence[bool]) -> Callable[..., Any]:
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
    """Gradient of the layer's input, in the home of `grad`, that of its output; `hidden` is in RAM.
    `weights`: the layer's parameters; the same as leaves; those of these that are trained, whose gradients are added to
    `into`."""
    tensors, leaves, trainable = weights
    attending = rows.before_attention(index, tensors, hidden, call)
    graphs = _attend(rows, attending)

    def back(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]):
        found = torch.autograd.grad(outputs, [*inputs, *trainable], grads, allow_unused=True)
        if into is not None:
            into.add(found[len(inputs) :])
        return found[: len(inputs)]

    def sums() -> Sequence[torch.Tensor]:
        return into.sums() if into is not None else []

    heads, results = attending.heads, attending.results
    grad_results = rows.homes.room(results.shape, results.dtype, passes=True)
    with rows.writer(grad) as grad_written, rows.writer(grad_results) as results_written:
        for tile in rows.tiles(call, hidden, results, grad):
            result, grad_y = heads.result(tile.more[0]), tile.more[1]
            made = rows.run_compiled(AFTER_BACK, index, tile, tensors, result, grad_y, sums())
            if made is None:
                result.requires_grad_()
                tile.hidden.requires_grad_()
                with torch.enable_grad():
                    output = rows.after(index, tile, leaves, result)
                made = back([output], [tile.hidden, result], [grad_y])
            grad_x, grad_result = made
            assert grad_result is not None
            with results_written.room(tile.tokens) as place:
                heads.pack_result(grad_result, place)
            grad_written.put(tile.tokens, torch.zeros_like(grad_y) if grad_x is None else grad_x)
    _back_through_attention(rows, attending, graphs, grad_results)
    with rows.writer(grad) as grad_written:
        for tile in rows.tiles(call, hidden, attending.rows, grad):
            gradients = heads.unpacked(tile.more[0])
            made = rows.run_compiled(BEFORE_BACK, index, tile, tensors, gradients, sums())
            if made is None:
                tile.hidden.requires_grad_()
                with torch.enable_grad():
                    parts, _ = rows.before(index, tile, leaves)
                made = back(parts, [tile.hidden], gradients)
            (grad_x,) = made
            grad_written.put(tile.tokens, tile.more[1] if grad_x is None else tile.more[1] + grad_x)
    return grad


def _attend(rows: LongRows, attending: Attending) -> list[GroupGraph]:
    """Attention's results, at home, and each group's way back."""
    graphs: list[GroupGraph] = []
    with rows.homes.sending() as leaving:
        for group, (of_group,) in enumerate(rows.homes.arriving([one] for one in attending.rows)):
            graph = GroupGraph(attending, of_group)
            leaving.send(graph.take_result().flatten(2).contiguous(), attending.results[group])
            graphs.append(graph)
            del of_group
    return graphs


def _back_through_attention(
    rows: LongRows, attending: Attending, graphs: list[GroupGraph], grad_results: torch.Tensor
) -> None:
    """Gradients in the place of queries, keys and values, at home."""
    homes = (attending.rows, attending.results, grad_results)
    with rows.homes.sending() as leaving:
        for group, (of_group, result, grad) in enumerate(rows.homes.arriving(zip(*homes, strict=True))):
            graphs.pop(0).back(of_group, result, grad)
            leaving.send(of_group, attending.rows[group])
            del of_group, result, grad


class GroupGraph:
    """Attention of one group of heads that has run, and its way back. Autograd would keep queries, keys, values and the
    result on the device for it; these are let go, and given again by `back`. What else it keeps stays: a number a head
    and token of a fused kernel's; masks and repeated keys of others."""

    def __init__(self, attending: Attending, rows: torch.Tensor) -> None:
        """`rows` [B, T, width]: the group's."""
        self._heads, self._grads = attending.heads, list[torch.Tensor | None]()
        self._again: dict[str, torch.Tensor] = {"rows": rows}
        """Rows by name, while they are there."""
        self._kept: list[_Kept] = []
        self._anchor = rows.new_zeros(()).requires_grad_()
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._keep, self._give):
            parts = _Enter.apply(self._grads, self._anchor, *self._heads.of_group(rows))
            result = attending.asked.of(*parts)
        self._edge = torch.autograd.graph.get_gradient_edge(result)
        self._result: torch.Tensor | None = result.detach()
        del self._again["rows"]
        if result.is_contiguous() and result.untyped_storage().nbytes() == result.nbytes:
            for kept in self._kept:
                kept.let_go("result", result)
        self._kept.clear()

    def take_result(self) -> torch.Tensor:
        """[B, T, H, D], once."""
        result, self._result = self._result, None
        assert result is not None
        return result

    def back(self, rows: torch.Tensor, result: torch.Tensor, grad: torch.Tensor) -> None:
        """Put gradients in the place of queries, keys and values in `rows`. `grad`: of the result, both [B, T,
        width]."""
        self._again = {"rows": rows, "result": result}
        of_heads = grad.unflatten(-1, (self._heads.shapes[0][0], -1))
        torch.autograd.grad(self._edge, self._anchor, of_heads, allow_unused=True)
        for place, found in zip(self._heads.of_group(rows), self._grads, strict=True):
            if found is None:
                place.zero_()
            else:
                place.copy_(found)
        self._grads.clear()
        self._again.clear()

    def _keep(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor.detach())
        kept.let_go("rows", self._again["rows"])
        self._kept.append(kept)
        return kept

    def _give(self, kept: _Kept) -> torch.Tensor:
        return kept.given(self._again)


class _Kept:
    """A tensor that autograd keeps, or where its numbers are found again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._name, self._offset = "", 0
        self._form = tensor.shape, tensor.stride()

    def let_go(self, name: str, whole: torch.Tensor) -> None:
        """Keep it no more if its memory is that of `whole`, which will be there again, perhaps in another place."""
        mine = self._tensor
        if mine is None or mine.dtype != whole.dtype:
            return
        if mine.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            self._tensor, self._name = None, name
            self._offset = mine.storage_offset() - whole.storage_offset()

    def given(self, again: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self._tensor is not None:
            return self._tensor
        whole = again[self._name]
        return whole.as_strided(*self._form, whole.storage_offset() + self._offset)


class _Enter(torch.autograd.Function):
    """Give the tensors back as such that autograd goes back to: their gradients are put into `grads`. As leaves of its
    graph they would stay in memory as long as the graph does."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor | None], anchor: torch.Tensor, *parts: torch.Tensor) -> Any:
        ctx.grads = grads
        return tuple(part.view_as(part) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.grads[:] = grads
        return None, None, *(None for _ in grads)


ROLE = "recompute_backward"


def recompute_backward(forward: Callable[..., torch.Tensor], trainable: Sequence[bool]) -> Callable[..., torch.Tensor]:
    """Gradient of the layer's input. Gradients of the trainable parameters are added to `sums`."""

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
        """Gradient of the layer's input. Gradients of its parameters are added to `into` (None: none is trained)."""
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
