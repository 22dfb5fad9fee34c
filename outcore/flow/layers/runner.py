"""Running one unit on one micro-batch with weights from a device slab: forward, and backward with recomputation.

Layers, embedding and head run by the model's own code with the slab's views bound in place of its parameters. Backward
recomputes the unit from its saved input and asks autograd for the gradients of exactly its inputs and parameters. The
head has a file of its own (`head`). The balancing loss of a mixture of experts mixes all layers, so its gradient with
respect to each layer's router logits is taken at the head and joined in when that layer runs backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from outcore.engine.stream.gradients.accumulator import GradAccumulator
from outcore.flow.layers.compiled import CompiledLayers
from outcore.flow.layers.head import Batch, HeadRunner
from outcore.flow.layers.unit_weights import UnitWeights, in_place
from outcore.flow.parts.shell import CallLog, LayerCall, StreamUnsupported
from outcore.flow.parts.units import Units
from outcore.flow.tiles.units import TiledUnits
from outcore.model.loss import LOGITS_CHUNK_BYTES, HeadLoss


class UnitRunner:
    """See the module docstring. `aux_coefficient` 0 switches the balancing loss off; `tiles`: units in tiles;
    `head_loss`: of each token, instead of cross-entropy."""

    def __init__(
        self,
        units: Units,
        *,
        vocab_size: int,
        aux_coefficient: float = 0.0,
        logits_chunk_bytes: int = LOGITS_CHUNK_BYTES,
        compiled: CompiledLayers | None = None,
        tiles: TiledUnits | None = None,
        head_loss: HeadLoss | None = None,
    ) -> None:
        self.units = units
        self.aux_coefficient = aux_coefficient
        self.compiled = compiled
        self.tiles = tiles
        self.weights = UnitWeights(tiles)
        self.head = HeadRunner(
            units,
            self.weights,
            vocab_size=vocab_size,
            logits_chunk_bytes=logits_chunk_bytes,
            aux_coefficient=aux_coefficient,
            compiled=compiled is not None and not compiled.why_not,
            tiles=tiles,
            head_loss=head_loss,
        )
        self._routers = [_router_modules(units, layer) for layer in units.layers] if aux_coefficient else []
        if aux_coefficient and not any(self._routers):
            raise StreamUnsupported("it has a balancing loss, but does not tell which modules are its routers")

    def num_routers(self, layer: int) -> int:
        """Router logits that this layer gives."""
        return len(self._routers[layer]) if self.aux_coefficient else 0

    # --- embedding

    @torch.no_grad()
    def embed(self, slab: torch.Tensor, batch: Batch) -> CallLog:
        """The first layer's input, and the other arguments of every layer."""
        with in_place(self.units.embed, self.weights.tensors(self.units.embed, slab)):
            log = self.units.record(batch)
        log.first = log.hidden.detach()
        return log

    def embed_backward(self, slab: torch.Tensor, batch: Batch, grad: torch.Tensor, into: GradAccumulator) -> None:
        """Add the gradients of the embedding's parameters for `grad` of its output."""
        leaves, trainable = self.weights.leaves(self.units.embed, slab)
        with torch.enable_grad(), in_place(self.units.embed, leaves):
            hidden = self.units.record(batch, with_masks=False).hidden
        if not hidden.requires_grad:  # where only a tied head's own parameters are trained
            return
        tiles = self.weights.tiles_of(self.units.embed)
        anchors = [] if tiles is None else tiles.anchors(self.units.embed)
        found = torch.autograd.grad(hidden, [*anchors, *trainable], grad, allow_unused=True)
        into.add(found[len(anchors) :])

    # --- layers

    @torch.no_grad()
    def layer(
        self, index: int, slab: torch.Tensor, hidden: torch.Tensor, call: LayerCall
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(output, router logits) of layer `index`."""
        unit = self.units.layer_units[index]
        tensors = self.weights.tensors(unit, slab)
        if (tiles := self.weights.tiles_of(unit)) is not None:
            tiles.begin_forward(unit)
        elif self.compiled is not None and self.compiled.is_active(index):
            output = self.compiled.forward(index, tensors, hidden, call)
            if output is not None:
                return output, []
        elif self.compiled is not None and self.compiled.has_eager_graphs(index):
            return self.compiled.eager(index, 0, self._eager_forward, tensors, hidden, call), []
        return self._run_layer(index, tensors, hidden, call)

    def layer_backward(
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
        unit = self.units.layer_units[index]
        if (tiles := self.weights.tiles_of(unit)) is not None:
            tiles.begin_backward(unit)
        elif self.compiled is not None and self.compiled.is_active(index):
            sums = into.sums() if into is not None else []
            found = self.compiled.backward(index, self.weights.tensors(unit, slab), hidden, call, grad, sums)
            if found is not None:
                return found
        elif self.compiled is not None and self.compiled.has_eager_graphs(index):
            sums = into.sums() if into is not None else []
            function = partial(self._eager_backward, slab=slab)
            return self.compiled.eager(index, 1, function, self.weights.tensors(unit, slab), hidden, call, grad, sums)
        leaves, trainable = self.weights.leaves(unit, slab)
        x = hidden.detach().requires_grad_()
        with torch.enable_grad():
            output, routers = self._run_layer(index, leaves, x, call)
        outputs, grads = [output], [grad]
        for logits, grad_logits in zip(routers, grad_routers, strict=True):
            if logits.requires_grad:
                outputs.append(logits)
                grads.append(grad_logits)
        grad_x, *grad_params = torch.autograd.grad(outputs, [x, *trainable], grads, allow_unused=True)
        if into is not None:
            into.add(grad_params)
        return grad_x

    def _eager_forward(
        self, index: int, tensors: list[torch.Tensor], hidden: torch.Tensor, args: tuple, kwargs: dict
    ) -> torch.Tensor:
        """As a graph takes it."""
        return self._run_layer(index, tensors, hidden, LayerCall(args, kwargs))[0]

    def _eager_backward(
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
        """Likewise; `tensors` are views of `slab`."""
        leaves, trainable = self.weights.leaves(self.units.layer_units[index], slab)
        x = hidden.detach().requires_grad_()
        with torch.enable_grad():
            output, _ = self._run_layer(index, leaves, x, LayerCall(args, kwargs))
        grad_x, *found = torch.autograd.grad(output, [x, *trainable], grad, allow_unused=True)
        for total, part in zip(sums, found, strict=True):
            if part is not None:
                total.add_(part)
        return grad_x

    def _run_layer(
        self, index: int, tensors: Sequence[torch.Tensor], hidden: torch.Tensor, call: LayerCall
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        routers: list[torch.Tensor] = []
        unit, layer = self.units.layer_units[index], self.units.layers[index]
        tiles = None if self.aux_coefficient else self.weights.tiles_of(unit)  # routers are seen once for all tokens
        chunks = nullcontext() if tiles is None else tiles.chunks.applied(layer, tiles[unit], tensors)
        seen = self._router_logits(index, routers) if self.aux_coefficient else nullcontext()
        with in_place(unit, tensors), chunks, seen:
            output = self.units.layers[index](hidden, *call.args, **call.kwargs)
        return (output if isinstance(output, torch.Tensor) else output[0]), routers

    @contextmanager
    def _router_logits(self, index: int, found: list[torch.Tensor]) -> Iterator[None]:
        hooks = []
        for module, item in self._routers[index]:
            hooks.append(
                module.register_forward_hook(
                    lambda _m, _a, out, i=item: found.append(out if isinstance(out, torch.Tensor) else out[i])
                )
            )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _router_modules(units: Units, layer: nn.Module) -> list[tuple[nn.Module, int]]:
    """(module, index of the logits in its output) for each router within a layer, by what the model says of itself."""
    found: list[tuple[nn.Module, int]] = []
    for holder in (units.parts.decoder, units.parts.causal):
        recorders = (getattr(holder, "_can_record_outputs", None) or {}).get("router_logits")
        if recorders is None:
            continue
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            target = getattr(recorder, "target_class", recorder)
            name = getattr(recorder, "layer_name", None)
            for path, module in layer.named_modules():
                if isinstance(target, type) and isinstance(module, target) and (not name or name in path.split(".")):
                    found.append((module, int(getattr(recorder, "index", 0))))
        break
    return found
