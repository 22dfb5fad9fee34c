"""The head on micro-batches: loss and, chunk by chunk of its logits, their gradients at once.

Nothing is recomputed, and the logits of one chunk are all that is ever held. The balancing loss of a mixture of experts
mixes all layers: its gradient with respect to each layer's router logits is taken here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from outcore.engine.stream.gradients.accumulator import GradAccumulator
from outcore.flow.layers.cross_entropy import CrossEntropy
from outcore.flow.layers.tiled_head import TiledHead
from outcore.flow.layers.unit_weights import UnitWeights, in_place
from outcore.flow.parts.shell import CallLog, StreamUnsupported
from outcore.flow.parts.units import Units
from outcore.flow.tiles.units import TiledUnits
from outcore.model.inputs import IGNORE, shifted_targets
from outcore.model.loss import HeadLoss, auto_num_chunks, summed_loss

Batch = dict[str, torch.Tensor]
EVAL_CHUNKS = 4
"""An evaluation takes chunks this many times smaller: its loss makes fp32 copies, and should not need more memory than
training."""
EAGER_CHUNKS = 2
"""So many times smaller are chunks whose loss is not compiled: it takes twice the memory (`cross_entropy`)."""


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


class HeadRunner:
    """`head_loss`: of each token, instead of cross-entropy; `compiled`: the cross-entropy through torch.compile."""

    def __init__(
        self,
        units: Units,
        weights: UnitWeights,
        *,
        vocab_size: int,
        logits_chunk_bytes: int,
        aux_coefficient: float,
        compiled: bool,
        tiles: TiledUnits | None,
        head_loss: HeadLoss | None,
    ) -> None:
        self.units, self.weights = units, weights
        self.vocab_size, self.logits_chunk_bytes = vocab_size, logits_chunk_bytes
        self.aux_coefficient = aux_coefficient
        self.head_loss = head_loss
        self._cross_entropy = CrossEntropy(compiled=compiled)
        self.tiled_head = (
            TiledHead(units, tiles, logits_chunk_bytes) if tiles is not None and units.head in tiles else None
        )
        if head_loss is not None and self.tiled_head is not None:
            raise StreamUnsupported(
                "its own loss(logits, labels) needs all logits of a token, and its head is computed in tiles of the "
                "vocabulary: raise tile_bytes"
            )

    def run(
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
            found = self.one(slab, item.hidden, item.batch, item.log, item.routers, grad_scale=grad_scale, into=into)
            del item  # its hidden states are not needed any more
            yield found

    def one(
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
        leaves, trainable = self.weights.leaves(self.units.head, slab)
        targets = shifted_targets(batch["labels"]).reshape(-1)
        n_tokens = (targets != IGNORE).sum()
        x = hidden.detach().requires_grad_(train)
        with torch.set_grad_enabled(train), in_place(self.units.head, leaves):
            final = self.units.finish(x, batch, log)
            flat = final.reshape(-1, final.shape[-1])
            grad_flat = torch.empty_like(flat) if train else None
            ce_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
            chunk_bytes = max(1, self.logits_chunk_bytes // self._smaller(train=train))
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

    def _smaller(self, *, train: bool) -> int:
        if not train:
            return EVAL_CHUNKS
        return 1 if self._cross_entropy.is_compiled else EAGER_CHUNKS

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
        with in_place(self.units.head, self.weights.tensors(self.units.head, slab)):
            final = self.units.finish(hidden, batch, log)[:1, -1:]
            if self.tiled_head is not None:
                return self.tiled_head.next_logits(slab, final)
            return self.units.parts.logits(final)[0, -1].float()
