"""Running one part on one batch with weights from a device slab, forward: the embedding and the layers.

They run by the model's own code with the slab's views bound in place of its parameters. The head has a file of its own
(`head`). `apply_layer` runs under autograd, too: whoever differentiates a layer binds leaves in place of the views.

Router logits of a mixture of experts, seen while its layers run: by what the model says of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outcore.flow.layers.compiled import PACKED, CompiledLayers
from outcore.flow.layers.long_rows import LongRows
from outcore.flow.layers.unit_weights import PartWeights, in_place, is_in_place
from outcore.flow.parts import CallLog, LayerCall, ModelParts, StreamUnsupported
from outcore.flow.tiles import TiledParts
from outcore.flow.weights import InPlaceProducts
from outcore.model.forward import shifted_targets


class RouterTaps:
    """Hooks at the routers of every layer. StreamUnsupported when the model does not tell which modules they are."""

    def __init__(self, units: ModelParts) -> None:
        self._routers = [_router_modules(units, layer) for layer in units.layers]
        if not any(self._routers):
            raise StreamUnsupported(
                "it has a balancing loss, but does not tell which modules are its routers (without that loss, "
                "output_router_logits false in its config, it may be streamed)"
            )

    @contextmanager
    def seen(self, layer: int, found: list[torch.Tensor]) -> Iterator[None]:
        """Within this context the logits of this layer's routers are appended to `found` as they are computed."""
        hooks = [
            module.register_forward_hook(
                lambda _m, _a, out, i=item: found.append(out if isinstance(out, torch.Tensor) else out[i])
            )
            for module, item in self._routers[layer]
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _router_modules(units: ModelParts, layer: nn.Module) -> list[tuple[nn.Module, int]]:
    """(module, index of the logits in its output) for each router within a layer."""
    found: list[tuple[nn.Module, int]] = []
    for holder in (units.parts.decoder, units.parts.causal):
        recorders = (getattr(holder, "_can_record_outputs", None) or {}).get("router_logits")
        if recorders is None:
            continue
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            target = getattr(recorder, "target_class", recorder)
            name = getattr(recorder, "layer_name", None)
            for path, module in layer.named_modules():
                is_there = not name or f".{name.strip('.')}." in f".{path}."
                if isinstance(target, type) and isinstance(module, target) and is_there:
                    found.append((module, int(getattr(recorder, "index", 0))))
        break
    return found


Batch = Mapping[str, torch.Tensor]


@dataclass
class HeadInput:
    """Input of the head, left by the parts below it, of one batch or, of long rows, of some tokens of it."""

    hidden: torch.Tensor
    batch: Batch
    log: CallLog
    targets: torch.Tensor | None = None
    """[B, T]: what each token is to predict; None: as the batch's labels say."""

    def flat_targets(self) -> torch.Tensor:
        """[B x T]"""
        targets = shifted_targets(self.batch["labels"]) if self.targets is None else self.targets
        return targets.reshape(-1)

    def cut(self, tokens: slice, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> HeadInput:
        """Make the input for some tokens, whose hidden states are given. `targets` [B, T]: of all."""
        length, num = self.hidden.shape[1], hidden.shape[1]
        shapes = {
            path: torch.Size(num if at < 2 and size == length else size for at, size in enumerate(shape))
            for path, shape in self.log.shapes.items()
        }
        batch = {name: tensor[:, tokens] for name, tensor in self.batch.items()}
        return HeadInput(hidden, batch, CallLog(shapes=shapes), None if targets is None else targets[:, tokens])


class PartRunner:
    """Forward of a model's parts. `tiles`: parts in tiles; `taps`: see the routers' logits as layers run;
    `in_place`: computes with packed parts that are not expanded; `long_rows`: runs layers on long rows, whose hidden
    states are in RAM from the embedding to the head; `entering`: hears of each layer before it is run."""

    def __init__(
        self,
        units: ModelParts,
        *,
        compiled: CompiledLayers | None = None,
        tiles: TiledParts | None = None,
        taps: RouterTaps | None = None,
        in_place: InPlaceProducts | None = None,
        long_rows: LongRows | None = None,
        entering: Callable[[int], None] | None = None,
    ) -> None:
        self.units, self.compiled, self.tiles, self.taps = units, compiled, tiles, taps
        self.long_rows, self._entering = long_rows, entering
        self.weights = PartWeights(tiles, in_place)

    @torch.no_grad()
    def embed(self, slab: torch.Tensor, batch: Batch, inputs: Mapping[str, Any] | None = None) -> CallLog:
        """The first layer's input, and the other arguments of every layer. `inputs`: as in `Call`."""
        with in_place(self.units.embed, self.weights.tensors(self.units.embed, slab)):
            log = self.units.record(batch, inputs=inputs)
        log.first = log.hidden.detach()
        if (long_rows := self.takes_long(log.first)) is not None:
            log.first = long_rows.homes.down(log.first)
        return log

    @torch.no_grad()
    def layer(
        self, index: int, slab: torch.Tensor, hidden: torch.Tensor, call: LayerCall
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(output, router logits) of layer `index`."""
        unit = self.units.layer_units[index]
        if self._entering is not None:
            self._entering(index)
        tensors = self.weights.tensors(unit, slab)
        if (tiles := self.weights.tiles_of(unit)) is not None:
            tiles.begin_forward(unit)
        elif (long_rows := self.takes_long(hidden)) is not None:
            return long_rows.forward(index, tensors, hidden, call), []
        elif is_in_place(slab):  # the CPU computes, or the device with bytes that are there
            if (output := self._packed(index, slab, hidden, call)) is not None:
                return output, []
        elif self.compiled is not None and self.compiled.is_active(index):
            output = self.compiled.run("forward", index, tensors, hidden, call)
            if output is not None:
                return output, []
        elif self.compiled is not None and self.compiled.has_eager_graphs(index):
            return self.compiled.eager("forward", index, self._as_graph, tensors, hidden, call), []
        return self.apply_layer(index, tensors, hidden, call)

    def _packed(self, index: int, slab: torch.Tensor, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor | None:
        """Output of layer `index` compiled, with packed weights that are on a GPU; None where it is not run so."""
        if slab.device.type != "cuda" or self.compiled is None or not self.compiled.is_active(index):
            return None
        views = self.weights.home_views(self.units.layer_units[index], slab)
        return self.compiled.run(PACKED, index, views, hidden, call) if self.compiled.takes_packed(index) else None

    def takes_long(self, hidden: torch.Tensor) -> LongRows | None:
        """Object that runs layers on these hidden states if their rows are long; else None."""
        return self.long_rows if self.long_rows is not None and self.long_rows.takes(hidden) else None

    def expect(self, hidden: torch.Tensor) -> None:
        """The next layer to run will be given these."""
        if (long_rows := self.takes_long(hidden)) is not None:
            long_rows.expect(hidden)

    def apply_layer(
        self, index: int, tensors: Sequence[torch.Tensor], hidden: torch.Tensor, call: LayerCall
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(output, router logits) by the layer's own code with `tensors` in place of its parameters."""
        routers: list[torch.Tensor] = []
        unit, layer = self.units.layer_units[index], self.units.layers[index]
        tiles = None if self.taps is not None else self.weights.tiles_of(unit)  # routers are seen once for all tokens
        chunks = nullcontext() if tiles is None else tiles.chunks.applied(layer, tiles[unit], tensors)
        seen = nullcontext() if self.taps is None else self.taps.seen(index, routers)
        with in_place(unit, tensors), chunks, seen:
            output = layer(hidden, *call.args, **call.kwargs)
        return (output if isinstance(output, torch.Tensor) else output[0]), routers

    def _as_graph(
        self, index: int, tensors: list[torch.Tensor], hidden: torch.Tensor, args: tuple, kwargs: dict
    ) -> torch.Tensor:
        return self.apply_layer(index, tensors, hidden, LayerCall(args, kwargs))[0]
