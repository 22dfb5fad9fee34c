"""Running one unit on one micro-batch with weights from a device slab: forward, and backward with recomputation.

Layers, embedding and head run by the model's own code with the slab's views bound in place of its parameters. Backward
recomputes the unit from its saved input and asks autograd for the gradients of exactly its inputs and parameters. The
head goes through its logits chunk by chunk, with the gradient of each chunk at once, so nothing is recomputed and the
logits of one chunk are all that is ever held. The balancing loss of a mixture of experts mixes all layers, so its
gradient with respect to each layer's router logits is taken at the head and joined in when that layer runs backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from outcore.engine.stream.accumulator import GradAccumulator
from outcore.engine.stream.compiled import CompiledLayers
from outcore.engine.stream.cross_entropy import CrossEntropy
from outcore.engine.stream.shell import CallLog, LayerCall, StreamUnsupported, bound
from outcore.engine.stream.tiles_head import TiledHead
from outcore.engine.stream.tiles_units import TiledUnits
from outcore.engine.stream.units import Unit, Units
from outcore.model.inputs import IGNORE, shifted_targets
from outcore.model.loss import LOGITS_CHUNK_BYTES, HeadLoss, auto_num_chunks, summed_loss

Batch = dict[str, torch.Tensor]
EVAL_CHUNKS = 4
"""An evaluation takes chunks this many times smaller: its loss makes fp32 copies, and should not need more memory than
training."""


@dataclass
class HeadInput:
    """What the head gets of one micro-batch."""

    hidden: torch.Tensor
    batch: Batch
    log: CallLog
    routers: Sequence[torch.Tensor] = ()


@dataclass
class HeadResult:
    """What the head makes of one micro-batch."""

    ce_sum: torch.Tensor
    """fp32 scalar: cross-entropy summed over unmasked tokens."""
    n_tokens: torch.Tensor
    aux_loss: torch.Tensor | None = None
    """fp32 scalar, already times its coefficient."""
    grad_of_hidden: torch.Tensor | None = None
    grad_routers: list[torch.Tensor] = field(default_factory=list)
    """Gradient of the objective with respect to every router's logits, in order."""

    @property
    def grad_hidden(self) -> torch.Tensor:
        """Gradient of the objective with respect to the last layer's output; there after a run with `grad_scale`."""
        assert self.grad_of_hidden is not None
        return self.grad_of_hidden


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
        self.vocab_size = vocab_size
        self.aux_coefficient = aux_coefficient
        self.logits_chunk_bytes = logits_chunk_bytes
        self.compiled = compiled
        self.head_loss = head_loss
        self._cross_entropy = CrossEntropy(compiled=compiled is not None and not compiled.why_not)
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        """Parameters as views of the few slabs there are, by (unit, address): made once, not for every call."""
        self.tiles = tiles
        self.tiled_head = (
            TiledHead(units, tiles, logits_chunk_bytes) if tiles is not None and units.head in tiles else None
        )
        if head_loss is not None and self.tiled_head is not None:
            raise StreamUnsupported(
                "its own loss(logits, labels) needs all logits of a token, and its head is computed in tiles of the "
                "vocabulary: raise tile_bytes"
            )
        self._routers = [_router_modules(units, layer) for layer in units.layers] if aux_coefficient else []
        if aux_coefficient and not any(self._routers):
            raise StreamUnsupported("it has a balancing loss, but does not tell which modules are its routers")

    def num_routers(self, layer: int) -> int:
        """Router logits that this layer gives."""
        return len(self._routers[layer]) if self.aux_coefficient else 0

    def _tiles_of(self, unit: Unit) -> TiledUnits | None:
        """None for a unit that comes in whole."""
        return self.tiles if self.tiles is not None and unit in self.tiles else None

    def _tensors(self, unit: Unit, slab: torch.Tensor) -> list[Any]:
        """All parameters, in slot order."""
        if (tiles := self._tiles_of(unit)) is not None:
            return tiles.tensors(unit, slab)
        key = (unit.index, slab.data_ptr())
        if key not in self._views:
            self._views[key] = unit.layout.views(slab)
        return self._views[key]

    def _leaves(self, unit: Unit, slab: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
        """(all parameters in slot order, those of them that autograd is asked about)."""
        if (tiles := self._tiles_of(unit)) is not None:
            return tiles.leaves(unit, slab)
        leaves = [
            view.detach().requires_grad_(slot.trainable)
            for slot, view in zip(unit.layout.slots, self._tensors(unit, slab), strict=True)
        ]
        return leaves, [leaf for leaf in leaves if leaf.requires_grad]

    # --- embedding

    @torch.no_grad()
    def embed(self, slab: torch.Tensor, batch: Batch) -> CallLog:
        """The first layer's input, and the other arguments of every layer."""
        with _weights(self.units.embed, self._tensors(self.units.embed, slab)):
            log = self.units.record(batch)
        log.first = log.hidden.detach()
        return log

    def embed_backward(self, slab: torch.Tensor, batch: Batch, grad: torch.Tensor, into: GradAccumulator) -> None:
        """Add the gradients of the embedding's parameters for `grad` of its output."""
        leaves, trainable = self._leaves(self.units.embed, slab)
        with torch.enable_grad(), _weights(self.units.embed, leaves):
            hidden = self.units.record(batch, with_masks=False).hidden
        if not hidden.requires_grad:  # where only a tied head's own parameters are trained
            return
        tiles = self._tiles_of(self.units.embed)
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
        tensors = self._tensors(unit, slab)
        if (tiles := self._tiles_of(unit)) is not None:
            tiles.begin_forward(unit)
        elif self.compiled is not None and self.compiled.is_active(index):
            output = self.compiled.forward(index, tensors, hidden, call)
            if output is not None:
                return output, []
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
        if (tiles := self._tiles_of(unit)) is not None:
            tiles.begin_backward(unit)
        elif self.compiled is not None and self.compiled.is_active(index):
            sums = into.sums() if into is not None else []
            found = self.compiled.backward(index, self._tensors(unit, slab), hidden, call, grad, sums)
            if found is not None:
                return found
        leaves, trainable = self._leaves(unit, slab)
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

    def _run_layer(
        self, index: int, tensors: Sequence[torch.Tensor], hidden: torch.Tensor, call: LayerCall
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        routers: list[torch.Tensor] = []
        unit, layer = self.units.layer_units[index], self.units.layers[index]
        tiles = None if self.aux_coefficient else self._tiles_of(unit)  # routers are seen once for all tokens
        chunks = nullcontext() if tiles is None else tiles.chunks.applied(layer, tiles[unit], tensors)
        with _weights(unit, tensors), chunks, self._router_logits(index, routers):
            output = self.units.layers[index](hidden, *call.args, **call.kwargs)
        return (output if isinstance(output, torch.Tensor) else output[0]), routers

    @contextmanager
    def _router_logits(self, index: int, found: list[torch.Tensor]) -> Iterator[None]:
        hooks = []
        for module, item in self._routers[index] if self.aux_coefficient else ():
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

    # --- head

    def heads(
        self,
        slab: torch.Tensor,
        inputs: Iterable[HeadInput],
        *,
        grad_scale: float | None = None,
        into: GradAccumulator | None = None,
    ) -> Iterator[HeadResult]:
        """Losses of micro-batches; with `grad_scale` (loss scale / tokens of the global batch) their gradients, too.

        One after another as they are asked for; in tiles all at once with the first.
        """
        if self.tiled_head is not None:

            def result(item: HeadInput, final: torch.Tensor, ce_sum: torch.Tensor, n: torch.Tensor) -> HeadResult:
                found = HeadResult(ce_sum, n)
                if grad_scale is not None and item.routers:
                    self._router_loss(found, final[None], item.batch, item.routers, grad_scale)
                return found

            yield from self.tiled_head.run(slab, inputs, result, grad_scale, into)
            return
        for item in inputs:
            found = self.head(slab, item.hidden, item.batch, item.log, item.routers, grad_scale=grad_scale, into=into)
            del item  # its hidden states are not needed any more
            yield found

    def head(
        self,
        slab: torch.Tensor,
        hidden: torch.Tensor,
        batch: Batch,
        log: CallLog,
        routers: Sequence[torch.Tensor] = (),
        *,
        grad_scale: float | None = None,
        into: GradAccumulator | None = None,
    ) -> HeadResult:
        """Loss of one micro-batch; with `grad_scale` (loss scale / tokens of the global batch) its gradients, too."""
        train = grad_scale is not None
        scale = grad_scale or 0.0
        leaves, trainable = self._leaves(self.units.head, slab)
        targets = shifted_targets(batch["labels"]).reshape(-1)
        n_tokens = (targets != IGNORE).sum()
        x = hidden.detach().requires_grad_(train)
        with torch.set_grad_enabled(train), _weights(self.units.head, leaves):
            final = self.units.finish(x, batch, log)
            flat = final.reshape(-1, final.shape[-1])
            grad_flat = torch.empty_like(flat) if train else None
            ce_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
            chunk_bytes = self.logits_chunk_bytes if train else max(1, self.logits_chunk_bytes // EVAL_CHUNKS)
            num_chunks = min(flat.shape[0], auto_num_chunks(flat.shape[0], self.vocab_size, chunk_bytes))
            start = 0
            for target in targets.tensor_split(num_chunks):
                piece = flat[start : start + len(target)].detach().requires_grad_(train)
                logits = self.units.parts.logits(piece[None])
                if grad_flat is None:
                    ce_sum += summed_loss(logits, target, self.head_loss)
                else:
                    part, seed, grad_seed = self._loss_and_seed(logits, target, scale)
                    ce_sum += part
                    del logits, part
                    grad_piece, *grads = torch.autograd.grad(seed, [piece, *trainable], grad_seed, allow_unused=True)
                    del seed, grad_seed
                    grad_flat[start : start + len(target)] = grad_piece
                    if into is not None:
                        into.add(grads)
                    del grad_piece, grads  # one chunk's at a time
                start += len(target)
            result = HeadResult(ce_sum, n_tokens)
            if grad_flat is not None:
                if routers:
                    self._router_loss(result, final.detach(), batch, routers, scale)
                result.grad_of_hidden, *grads = torch.autograd.grad(flat, [x, *trainable], grad_flat, allow_unused=True)
                if into is not None:
                    into.add(grads)
        return result

    def _loss_and_seed(
        self, logits: torch.Tensor, target: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(loss of a chunk, tensor that backward starts at, the gradient there)."""
        if self.head_loss is not None:
            part = summed_loss(logits, target, self.head_loss)
            return part.detach(), part * scale, None
        part, grad = self._cross_entropy(logits.detach().reshape(-1, logits.shape[-1]), target, scale)
        return part, logits, grad.view_as(logits)

    def _router_loss(
        self, result: HeadResult, final: torch.Tensor, batch: Batch, routers: Sequence[torch.Tensor], grad_scale: float
    ) -> None:
        leaves = [logits.detach().requires_grad_() for logits in routers]
        raw = self.units.parts.router_loss(final, tuple(leaves), batch.get("attention_mask")).float()
        aux = self.aux_coefficient * raw
        result.aux_loss = aux.detach()
        result.grad_routers = list(torch.autograd.grad(aux * (result.n_tokens * grad_scale), leaves))

    @torch.no_grad()
    def next_logits(self, slab: torch.Tensor, hidden: torch.Tensor, batch: Batch, log: CallLog) -> torch.Tensor:
        """fp32 logits [V] of the token after the last position of the first row."""
        with _weights(self.units.head, self._tensors(self.units.head, slab)):
            final = self.units.finish(hidden, batch, log)[:1, -1:]
            if self.tiled_head is not None:
                return self.tiled_head.next_logits(slab, final)
            return self.units.parts.logits(final)[0, -1].float()


def _weights(unit: Unit, tensors: Sequence[torch.Tensor]) -> Any:
    return bound(unit.owners, tensors)


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
