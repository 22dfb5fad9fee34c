"""The head over a vocabulary in tiles: neither its weight nor the logits of all tokens exist on the device.

The model's own head runs with a tile of the weight (and of a bias) in place of the whole, which gives a tile of the
logits, soft-capping and scaling included. Two passes over the tiles: the first gathers the log-sum-exp of each token's
logits online (running maximum and sum) and the target's logit; the second computes the logits again, turns them into
softmax minus target, and asks autograd for the gradients of hidden states and tile. Each pass takes all micro-batches
and token chunks before the next tile, so the weight comes up twice a step and a tile's gradient is complete when the
tile is done. Gradients of hidden states are summed over tiles in fp32. Cost: the logits are computed twice (4/3 of the
head's FLOPs), and the last hidden states of all micro-batches are kept, twice in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from outcore.engine.stream.gradients.accumulator import GradAccumulator
from outcore.flow.parts.shell import StreamUnsupported, bound
from outcore.flow.parts.units import Units
from outcore.flow.tiles.matrix import TiledMatrix
from outcore.flow.tiles.units import TiledUnits
from outcore.model.inputs import IGNORE, shifted_targets

if TYPE_CHECKING:
    from outcore.flow.layers.head import HeadInput, HeadResult


@dataclass
class _Row:
    """One micro-batch at the head."""

    x: torch.Tensor
    flat: torch.Tensor
    """[N, H], what the projection gets; part of autograd's graph from x."""
    targets: torch.Tensor
    largest: torch.Tensor
    """[N] fp32: the running maximum of its tokens' logits."""
    exp_sum: torch.Tensor
    """[N] fp32: sum of exp(logit - largest)."""
    of_target: torch.Tensor
    """[N] fp32: the target's logit."""
    grad: torch.Tensor | None = None
    """[N, H] fp32."""

    @property
    def lse(self) -> torch.Tensor:
        return self.largest + self.exp_sum.log()


class TiledHead:
    """See the module docstring. `chunk_bytes`: fp32 logits of one chunk of tokens over one tile."""

    def __init__(self, units: Units, tiles: TiledUnits, chunk_bytes: int) -> None:
        self.units, self.tiles, self.chunk_bytes = units, tiles, chunk_bytes
        self.matrix, self._place = self._find()

    def _find(self) -> tuple[TiledMatrix, int]:
        """The vocabulary's weight and its place among the unit's slots: of the tiled ones, what the head alone uses."""
        unit = self.units.head
        decoder = set(self.units.parts.decoder.modules())
        found = [
            (self.tiles[unit].matrices[slot.name][0], place)
            for place, (slot, owners) in enumerate(zip(unit.layout.slots, unit.owners, strict=True))
            if slot.name in self.tiles[unit].matrices and any(module not in decoder for module, _ in owners)
        ]
        if len(found) != 1 or len(found[0][0].slot.shape) != 2:
            names = ", ".join(matrix.slot.name for matrix, _ in found) or "none"
            raise StreamUnsupported(
                f"its head should have one weight to compute in tiles, it has {len(found)} ({names})"
                + (": leave it out of lora target_modules" if "lora_" in names else "")
            )
        return found[0]

    @contextmanager
    def _bound(self, tensors: Sequence[Any], tile: torch.Tensor, rows: tuple[int, int]) -> Iterator[None]:
        """The model with one tile in place of the vocabulary's weight, and the same rows of a bias beside it."""
        unit = self.units.head
        modules = {id(module) for module, _ in unit.owners[self._place]}
        taken = list(tensors)
        taken[self._place] = tile
        for place, (slot, owners) in enumerate(zip(unit.layout.slots, unit.owners, strict=True)):
            beside = any(id(module) in modules for module, _ in owners)
            if place != self._place and beside and slot.shape == (self.matrix.num_rows,):
                taken[place] = tensors[place][rows[0] : rows[1]]
        with bound(unit.owners, taken):
            yield

    def run(
        self,
        slab: torch.Tensor,
        inputs: Iterable[HeadInput],
        make_result: Callable[..., HeadResult],
        grad_scale: float | None,
        into: GradAccumulator | None,
    ) -> list[HeadResult]:
        """As `HeadRunner.run`; `make_result(item, final, ce_sum, n_tokens)` begins a result."""
        train = grad_scale is not None
        leaves, trainable = self.tiles.leaves(self.units.head, slab)
        results: list[HeadResult] = []
        rows: list[_Row] = []
        items: list[HeadInput] = []
        for item in inputs:
            self.tiles.begin_backward(self.units.head)
            x = item.hidden.detach().requires_grad_(train)
            with torch.set_grad_enabled(train), bound(self.units.head.owners, leaves):
                final = self.units.finish(x, item.batch, item.log)
            rows.append(self._row(x, final, item))
            items.append(item)
        self.tiles.work.ring.restart("head")
        self._gather(leaves, rows)
        for item, row in zip(items, rows, strict=True):
            unmasked = row.targets != IGNORE
            ce_sum = torch.where(unmasked, row.lse - row.of_target, 0.0).sum()
            results.append(make_result(item, row.flat.detach(), ce_sum, unmasked.sum()))
        if grad_scale is not None:
            self._differentiate(leaves, trainable, rows, grad_scale, into)
            for row, result in zip(rows, results, strict=True):
                assert row.grad is not None
                with bound(self.units.head.owners, leaves):
                    result.grad_of_hidden, *grads = torch.autograd.grad(
                        row.flat, [row.x, *trainable], row.grad.to(row.flat.dtype), allow_unused=True
                    )
                row.grad = None
                if into is not None:
                    into.add(grads)
        return results

    def _row(self, x: torch.Tensor, final: torch.Tensor, item: HeadInput) -> _Row:
        flat = final.reshape(-1, final.shape[-1])
        n = len(flat)
        return _Row(
            x,
            flat,
            shifted_targets(item.batch["labels"]).reshape(-1),
            torch.full((n,), -torch.inf, device=flat.device),
            torch.zeros(n, device=flat.device),
            torch.zeros(n, device=flat.device),
        )

    def _chunks(self, row: _Row, num_rows: int) -> Iterator[slice]:
        step = max(16, self.chunk_bytes // (4 * num_rows))
        for start in range(0, len(row.flat), step):
            yield slice(start, min(start + step, len(row.flat)))

    def _logits(self, piece: torch.Tensor, num_rows: int) -> torch.Tensor:
        logits = self.units.parts.logits(piece[None]).float()
        if logits.shape != (1, len(piece), num_rows):
            raise StreamUnsupported(
                f"its head gives logits of shape {tuple(logits.shape)} for a tile of {num_rows} tokens of its "
                "vocabulary, so it cannot be computed in tiles"
            )
        return logits[0]

    @torch.no_grad()
    def _gather(self, tensors: Sequence[Any], rows: list[_Row]) -> None:
        """First pass: log-sum-exp and the targets' logits."""
        for number, tile in self.tiles.work.ring.tiles(self.matrix, "head forward"):
            first, last = self.matrix.rows(number)
            for row in rows:
                for at in self._chunks(row, last - first):
                    with self._bound(tensors, tile, (first, last)):
                        logits = self._logits(row.flat[at].detach(), last - first)
                    largest = torch.maximum(row.largest[at], logits.amax(-1))
                    scaled = row.exp_sum[at] * (row.largest[at] - largest).exp()
                    row.exp_sum[at] = scaled + (logits - largest[:, None]).exp_().sum(-1)
                    row.largest[at] = largest
                    inside = (row.targets[at] >= first) & (row.targets[at] < last)
                    column = (row.targets[at] - first).clamp(0, last - first - 1)
                    of_target = logits.gather(1, column[:, None])[:, 0]
                    row.of_target[at] = torch.where(inside, of_target, row.of_target[at])

    def _differentiate(
        self,
        leaves: Sequence[Any],
        trainable: Sequence[torch.Tensor],
        rows: list[_Row],
        grad_scale: float,
        into: GradAccumulator | None,
    ) -> None:
        """Second pass: gradients of the tiles, which go down, and of the hidden states, which are left in the rows."""
        gradients = self.tiles.work.gradients
        wanted = self.matrix.slot.trainable and gradients is not None
        lses = [row.lse for row in rows]
        for row in rows:
            row.grad = torch.zeros(row.flat.shape, dtype=torch.float32, device=row.flat.device)
        for number, tile in self.tiles.work.ring.tiles(self.matrix, "head backward"):
            first, last = self.matrix.rows(number)
            total: torch.Tensor | None = None
            leaf = tile.detach().requires_grad_(wanted)
            for row, lse in zip(rows, lses, strict=True):
                for at in self._chunks(row, last - first):
                    piece = row.flat[at].detach().requires_grad_()
                    with torch.enable_grad(), self._bound(leaves, leaf, (first, last)):
                        logits = self._logits(piece, last - first)
                    grad = _softmax_less_target(logits.detach(), lse[at], row.targets[at], first)
                    asked = [piece, *([leaf] if wanted else []), *trainable]
                    grad_piece, *grads = torch.autograd.grad(logits, asked, grad.mul_(grad_scale), allow_unused=True)
                    assert row.grad is not None
                    row.grad[at] += grad_piece
                    del logits, grad
                    if wanted:
                        part, *grads = grads
                        total = part.float() if total is None else total.add_(part)
                    if into is not None:
                        into.add(grads)
            if gradients is not None and wanted:
                assert total is not None
                gradients.complete(self.matrix, number, total)

    @torch.no_grad()
    def next_logits(self, slab: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        """final [1, 1, H] -> fp32 logits [V]."""
        tensors = self.tiles.tensors(self.units.head, slab)
        found = []
        for number, tile in self.tiles.work.ring.tiles(self.matrix, "head forward"):
            first, last = self.matrix.rows(number)
            with self._bound(tensors, tile, (first, last)):
                found.append(self._logits(final[0], last - first)[0])
        return torch.cat(found)


def _softmax_less_target(logits: torch.Tensor, lse: torch.Tensor, targets: torch.Tensor, first: int) -> torch.Tensor:
    """The gradient of the summed cross-entropy with respect to a tile of fp32 logits, [n, rows from `first` on]."""
    grad = (logits - lse[:, None]).exp_()
    column = targets - first
    inside = (column >= 0) & (column < logits.shape[1])
    column = column.clamp(0, logits.shape[1] - 1)[:, None]
    grad.scatter_add_(1, column, -inside.to(grad.dtype)[:, None])
    return grad.mul_((targets != IGNORE)[:, None])
