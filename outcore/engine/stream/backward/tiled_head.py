"""Gradients of a head over a vocabulary in tiles: a second pass over the tiles behind the one that gives the loss.

The logits are computed again, turned into softmax minus target, and autograd is asked for the gradients of hidden
states and tile. All micro-batches and chunks of tokens are through before the next tile, so the weight comes up twice a
step and a tile's gradient is complete when the tile is done. Gradients of hidden states are summed over tiles in fp32.
Cost: the logits are computed twice (4/3 of the head's FLOPs), and the last hidden states of all micro-batches are kept,
twice in fp32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.engine.stream.gradients.download import GradAccumulator
from outcore.flow.layers import HeadInput, HeadRow, TiledHead
from outcore.flow.parts import bound
from outcore.model.forward import IGNORE


@dataclass
class TiledHeadResult:
    """What the tiled head makes of one micro-batch."""

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
        """Second pass: gradients of the tiles, which go down; those of the rows, fp32 [N, H'], are returned."""
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
