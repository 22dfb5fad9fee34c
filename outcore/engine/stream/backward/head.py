"""The head's loss and, chunk by chunk of its logits, the gradients at once: nothing is recomputed.

The logits of one chunk are all that is ever held. The balancing loss of a mixture of experts mixes all layers: its
gradient with respect to each layer's router logits is taken here, too.

Cross-entropy of one chunk of logits and its gradient at once; autograd makes many passes over fp32 copies of it.

The gradient of the sum over tokens is softmax minus one at the target: known as soon as the logits are, so nothing has
to be kept between forward and backward. Through torch.compile it takes two passes over the 16-bit logits and writes a
16-bit gradient, and no fp32 copy exists. Eagerly one fp32 copy is worked on in place. Memory beside the logits, in
fp32 logits of the chunk: 0.5 compiled, 1.5 eagerly (copy and 16-bit gradient); with the 16-bit logits 1 and 2.

Gradients of a head over a vocabulary in tiles: a second pass over the tiles behind the one that gives the loss.

The logits are computed again, turned into softmax minus target, and autograd is asked for the gradients of hidden
states and tile. All micro-batches and chunks of tokens are through before the next tile, so the weight comes up twice a
step and a tile's gradient is complete when the tile is done. Gradients of hidden states are summed over tiles in fp32.
Cost: the logits are computed twice (4/3 of the head's FLOPs), and the last hidden states of all micro-batches are kept,
twice in fp32."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outcore.engine.stream.gradients.download import GradAccumulator
from outcore.flow.layers import Batch, Head, HeadInput, HeadRow, TiledHead, in_place
from outcore.flow.parts import bound
from outcore.model import summed_loss
from outcore.model.forward import IGNORE
from outcore.sizing.activations import EAGER_CHUNKS


@dataclass
class TiledHeadResult:
    """Result of the tiled head for one micro-batch."""

    ce_sum: torch.Tensor
    n_tokens: torch.Tensor
    grad_hidden: torch.Tensor
    flat: torch.Tensor
    """[N, H'], the decoder's result."""


class TiledHeadGradient:
    """Loss and gradients of what `head` computes."""

    def __init__(self, head: TiledHead) -> None:
        self.head, self.units, self.tiles = head, head.units, head.tiles

    def run(
        self, slab: torch.Tensor, inputs: Iterable[HeadInput], grad_scale: float, into: GradAccumulator | None
    ) -> list[TiledHeadResult]:
        """Losses and gradients of all micro-batches at once."""
        leaves, trainable = self.tiles.leaves(self.units.head, slab)
        rows: list[HeadRow] = []
        hidden: list[torch.Tensor] = []
        for item in inputs:
            self.tiles.begin_backward(self.units.head)
            x = item.hidden.detach().requires_grad_()
            with torch.enable_grad(), bound(self.units.head.owners, leaves):
                rows.append(HeadRow.of(self.units.finish(x, item.batch, item.log), item.batch["labels"]))
            hidden.append(x)
        self.tiles.work.ring.restart("head")
        self.head.gather(leaves, rows)
        losses = [row.loss() for row in rows]
        grads_of_rows = self._differentiate(leaves, trainable, rows, grad_scale, into)
        results = []
        for row, x, (ce_sum, n_tokens) in zip(rows, hidden, losses, strict=True):
            with bound(self.units.head.owners, leaves):
                grad_hidden, *grads = torch.autograd.grad(
                    row.flat, [x, *trainable], grads_of_rows.pop(0).to(row.flat.dtype), allow_unused=True
                )
            if into is not None:
                into.add(grads)
            results.append(TiledHeadResult(ce_sum, n_tokens, grad_hidden, row.flat.detach()))
        return results

    def _differentiate(
        self,
        leaves: Sequence[Any],
        trainable: Sequence[torch.Tensor],
        rows: list[HeadRow],
        grad_scale: float,
        into: GradAccumulator | None,
    ) -> list[torch.Tensor]:
        """Second pass over the tiles: gradients of tiles go to RAM, those of the rows (fp32 [N, H']) are returned."""
        gradients, matrix = self.tiles.work.gradients, self.head.matrix
        wanted = matrix.slot.trainable and gradients is not None
        lses = [row.lse for row in rows]
        found = [torch.zeros(row.flat.shape, dtype=torch.float32, device=row.flat.device) for row in rows]
        for number, tile in self.tiles.work.ring.tiles(matrix, "head backward"):
            first, last = matrix.rows(number)
            total: torch.Tensor | None = None
            leaf = tile.detach().requires_grad_(wanted)
            for row, lse, grad_of_row in zip(rows, lses, found, strict=True):
                for at in self.head.chunks(row, last - first):
                    piece = row.flat[at].detach().requires_grad_()
                    with torch.enable_grad(), self.head.bound(leaves, leaf, (first, last)):
                        logits = self.head.tile_logits(piece, last - first)
                    grad = _softmax_less_target(logits.detach(), lse[at], row.targets[at], first)
                    asked = [piece, *([leaf] if wanted else []), *trainable]
                    grad_piece, *grads = torch.autograd.grad(logits, asked, grad.mul_(grad_scale), allow_unused=True)
                    grad_of_row[at] += grad_piece
                    del logits, grad
                    if wanted:
                        part, *grads = grads
                        total = part.float() if total is None else total.add_(part)
                    if into is not None:
                        into.add(grads)
            if gradients is not None and wanted:
                assert total is not None
                gradients.complete(matrix, number, total)
        return found


def _softmax_less_target(logits: torch.Tensor, lse: torch.Tensor, targets: torch.Tensor, first: int) -> torch.Tensor:
    """The gradient of the summed cross-entropy with respect to a tile of fp32 logits, [n, rows from `first` on]."""
    grad = (logits - lse[:, None]).exp_()
    column = targets - first
    inside = (column >= 0) & (column < logits.shape[1])
    column = column.clamp(0, logits.shape[1] - 1)[:, None]
    grad.scatter_add_(1, column, -inside.to(grad.dtype)[:, None])
    return grad.mul_((targets != IGNORE)[:, None])


logger = logging.getLogger(__name__)

Pair = tuple[torch.Tensor, torch.Tensor]


def sum_and_gradient(logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor) -> Pair:
    """(fp32 sum of the cross-entropy over targets [n] that are not IGNORE, `scale` times its gradient).

    logits [n, V] of any float type; arithmetic in fp32, the gradient in the logits' type. `scale`: fp32 scalar."""
    wide = logits.float()
    lse = torch.logsumexp(wide, dim=-1, keepdim=True)
    counted = (targets != IGNORE)[:, None]
    column = targets.clamp(min=0)[:, None]
    loss = torch.where(counted, lse - wide.gather(1, column), 0.0).sum()
    at_target = torch.arange(logits.shape[1], device=logits.device)[None] == column
    grad = torch.where(counted, ((wide - lse).exp() - at_target.float()) * scale, 0.0)
    return loss, grad.to(logits.dtype)


@torch.no_grad()
def sum_and_gradient_eager(logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor) -> Pair:
    """Compute `sum_and_gradient` without a compiler that fuses it: in place on one fp32 copy of the logits.

    `torch.logsumexp` makes a second copy for its exponentials. These are its own steps (torch 2.13), done in the first
    copy, which the logits then fill again: the same bits, one pass more."""
    wide = logits.float() if logits.dtype != torch.float32 else logits.clone()
    largest = wide.amax(dim=-1, keepdim=True)
    largest.masked_fill_(largest.abs() == torch.inf, 0.0)
    lse = wide.sub_(largest).exp_().sum(dim=-1, keepdim=True).log_().add_(largest)
    counted = (targets != IGNORE)[:, None]
    column = targets.clamp(min=0)[:, None]
    loss = torch.where(counted, lse - logits.gather(1, column).float(), 0.0).sum()
    grad = wide.copy_(logits).sub_(lse).exp_()
    grad.scatter_add_(1, column, torch.full_like(lse, -1.0))
    grad.mul_(torch.where(counted, scale, 0.0))
    return loss, grad.to(logits.dtype)


class CrossEntropy:
    """`sum_and_gradient`, compiled where that is wanted; when compilation fails it goes on eagerly and says so once."""

    def __init__(self, *, compiled: bool, backend: str | Callable[..., Any] = "inductor") -> None:
        self._compiled = torch.compile(sum_and_gradient, fullgraph=True, backend=backend) if compiled else None
        self.why_not = "" if compiled else "not asked for"

    @property
    def is_compiled(self) -> bool:
        """True until compiling fails."""
        return self._compiled is not None

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor, scale: float) -> Pair:
        """(fp32 sum over the targets that count, gradient [n, V] in the logits' type) for logits [n, V]."""
        factor = torch.full((), scale, dtype=torch.float32, device=logits.device)
        if self._compiled is not None:
            from outcore.flow.layers import compiler_errors

            try:
                with torch.no_grad():
                    return self._compiled(logits, targets, factor)
            except compiler_errors() as error:
                self._compiled = None
                self.why_not = f"{type(error).__name__}: {' '.join(str(error).split()[:40])}"
                logger.warning("the loss is computed eagerly: %s", self.why_not)
        return sum_and_gradient_eager(logits, targets, factor)


@dataclass
class HeadResult:
    """Result of the head for one micro-batch."""

    ce_sum: torch.Tensor
    """fp32 scalar: cross-entropy summed over unmasked tokens."""
    n_tokens: torch.Tensor
    grad_hidden: torch.Tensor
    """Gradient of the objective with respect to the last layer's output."""
    aux_loss: torch.Tensor | None = None
    """fp32 scalar, already times its coefficient."""
    aux_tokens: torch.Tensor | None = None
    """Number of tokens of the global batch it counts; None: by the micro-batch's own."""
    grad_routers: list[torch.Tensor] = field(default_factory=list)
    """Gradient of the objective with respect to every router's logits, in order."""

    @property
    def aux_sum(self) -> torch.Tensor | float:
        """Auxiliary loss times the tokens that it counts by."""
        if self.aux_loss is None:
            return 0.0
        return self.aux_loss.double() * (self.n_tokens if self.aux_tokens is None else self.aux_tokens)


class StreamedHeadGradient:
    """Loss and gradients of what `head` computes. `aux_coefficient`: of the balancing loss, 0 without, and
    whether it counts whole for each micro-batch; `compiled`: the cross-entropy through torch.compile."""

    def __init__(
        self, head: Head, *, aux_coefficient: float = 0.0, is_aux_whole: bool = False, compiled: bool = False
    ) -> None:
        self.head, self.units, self.weights = head, head.units, head.weights
        self.aux_coefficient, self.is_aux_whole = aux_coefficient, is_aux_whole
        self._cross_entropy = CrossEntropy(compiled=compiled)
        self._tiled = None if head.tiled is None else TiledHeadGradient(head.tiled)

    def run(
        self,
        slab: torch.Tensor,
        inputs: Iterable[tuple[HeadInput, Sequence[torch.Tensor]]],
        *,
        grad_scale: float,
        into: GradAccumulator | None = None,
        aux_tokens: torch.Tensor | None = None,
    ) -> Iterator[HeadResult]:
        """Losses and gradients of micro-batches (and the routers' logits of each), one after another as they are asked
        for; in tiles all at once with the first. `grad_scale`: loss scale / tokens of the global batch; `aux_tokens`:
        by how many a balancing loss counts (None: by those of its micro-batch)."""
        if self._tiled is not None:
            kept: list[tuple[Batch, Sequence[torch.Tensor]]] = []

            def hidden_only() -> Iterator[HeadInput]:
                for item, routers in inputs:
                    kept.append((item.batch, routers))
                    yield self.head.on_device(item)

            for row, (batch, routers) in zip(self._tiled.run(slab, hidden_only(), grad_scale, into), kept, strict=True):
                long_rows, grad = self.head.runner.takes_long(row.grad_hidden), row.grad_hidden
                grad = grad if long_rows is None else long_rows.homes.down(grad, passes=True)
                found = HeadResult(row.ce_sum, row.n_tokens, grad)
                if routers:
                    found.aux_tokens = aux_tokens
                    self._router_loss(found, row.flat[None], batch, routers, grad_scale)
                yield found
            return
        for item, routers in inputs:
            found = self.one(slab, item, routers, grad_scale=grad_scale, into=into, aux_tokens=aux_tokens)
            del item, routers  # its hidden states are not needed any more
            yield found

    def one(
        self,
        slab: torch.Tensor,
        item: HeadInput,
        routers: Sequence[torch.Tensor] = (),
        *,
        grad_scale: float,
        into: GradAccumulator | None = None,
        aux_tokens: torch.Tensor | None = None,
    ) -> HeadResult:
        """Loss and gradients of one micro-batch. On long rows the gradient takes the home of the hidden states, or is
        near."""
        if (long_rows := self.head.runner.takes_long(item.hidden)) is None:
            return self._of(slab, item, routers, grad_scale, into, aux_tokens)
        sums: list[tuple[torch.Tensor, torch.Tensor]] = []
        grad = long_rows.homes.room_after(item.hidden)
        with long_rows.writer(grad) as written:
            for tokens, piece in self.head.pieces(item):
                found = self._of(slab, piece, (), grad_scale, into, None)
                written.put(tokens, found.grad_hidden)
                sums.append((found.ce_sum, found.n_tokens))
        ce_sum, n_tokens = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
        return HeadResult(ce_sum, n_tokens, grad)

    def _of(
        self,
        slab: torch.Tensor,
        item: HeadInput,
        routers: Sequence[torch.Tensor],
        grad_scale: float,
        into: GradAccumulator | None,
        aux_tokens: torch.Tensor | None,
    ) -> HeadResult:
        leaves, trainable = self.weights.leaves(self.units.head, slab)
        targets = item.flat_targets()
        n_tokens = (targets != IGNORE).sum()
        x = item.hidden.detach().requires_grad_()
        with torch.enable_grad(), in_place(self.units.head, leaves):
            final = self.units.finish(x, item.batch, item.log)
            flat = final.reshape(-1, final.shape[-1])
            grad_flat = torch.empty_like(flat)
            ce_sum = torch.zeros((), dtype=torch.float32, device=flat.device)
            start = 0
            num_chunks = self.head.num_chunks(len(flat), 1 if self._cross_entropy.is_compiled else EAGER_CHUNKS)
            for target in targets.tensor_split(num_chunks):
                piece = flat[start : start + len(target)].detach().requires_grad_()
                logits = self.units.parts.logits(piece[None])
                part, seed, grad_seed = self._loss_and_seed(logits, target, grad_scale)
                ce_sum += part
                del logits, part
                grad_piece, *grads = torch.autograd.grad(seed, [piece, *trainable], grad_seed, allow_unused=True)
                del seed, grad_seed
                grad_flat[start : start + len(target)] = grad_piece
                if into is not None:
                    into.add(grads)
                del grad_piece, grads  # one chunk's at a time
                start += len(target)
            result = HeadResult(ce_sum, n_tokens, grad_flat, aux_tokens=aux_tokens)
            if routers:
                self._router_loss(result, final.detach(), item.batch, routers, grad_scale)
            result.grad_hidden, *grads = torch.autograd.grad(flat, [x, *trainable], grad_flat, allow_unused=True)
            if into is not None:
                into.add(grads)
        return result

    def _loss_and_seed(
        self, logits: torch.Tensor, target: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(loss of a chunk, tensor that backward starts at, the gradient there)."""
        if self.head.head_loss is not None:
            part = summed_loss(logits, target, self.head.head_loss)
            return part.detach(), part * scale, None
        part, grad = self._cross_entropy(logits.detach().reshape(-1, logits.shape[-1]), target, scale)
        return part, logits, grad.view_as(logits)

    def _router_loss(
        self, result: HeadResult, final: torch.Tensor, batch: Batch, routers: Sequence[torch.Tensor], grad_scale: float
    ) -> None:
        leaves = [logits.detach().requires_grad_() for logits in routers]
        with torch.enable_grad():
            raw = self.units.parts.router_loss(final, tuple(leaves), batch.get("attention_mask")).float()
            aux = self.aux_coefficient * raw
            result.aux_loss = aux.detach()
            tokens = result.n_tokens if result.aux_tokens is None else result.aux_tokens
            result.grad_routers = list(torch.autograd.grad(aux * (tokens * grad_scale), leaves))
