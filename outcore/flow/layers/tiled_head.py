"""The head over a vocabulary in tiles: neither its weight nor the logits of all tokens exist on the device.

The model's own head runs with a tile of the weight (and of a bias) in place of the whole, which gives a tile of the
logits, soft-capping and scaling included. One pass over the tiles gathers the log-sum-exp of each token's logits online
(running maximum and sum) and the target's logit. It takes all batches and chunks of tokens before the next tile, so the
weight comes up once. Cost: the last hidden states of all batches are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from outcore.flow.layers.runner import HeadInput
from outcore.flow.parts import ModelParts, StreamUnsupported, bound
from outcore.flow.tiles import TiledMatrix, TiledParts
from outcore.model.forward import IGNORE, shifted_targets


@dataclass
class HeadRow:
    """One batch at the head."""

    flat: torch.Tensor
    """[N, H'], what the projection gets."""
    targets: torch.Tensor
    largest: torch.Tensor
    """[N] fp32: the running maximum of its tokens' logits."""
    exp_sum: torch.Tensor
    """[N] fp32: sum of exp(logit - largest)."""
    of_target: torch.Tensor
    """[N] fp32: the target's logit."""

    @classmethod
    def of(cls, final: torch.Tensor, labels: torch.Tensor) -> HeadRow:
        """For the decoder's result [B, T, H']."""
        flat = final.reshape(-1, final.shape[-1])
        n, device = len(flat), flat.device
        return cls(
            flat,
            shifted_targets(labels).reshape(-1),
            torch.full((n,), -torch.inf, device=device),
            torch.zeros(n, device=device),
            torch.zeros(n, device=device),
        )

    @property
    def lse(self) -> torch.Tensor:
        return self.largest + self.exp_sum.log()

    def loss(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(fp32 sum of the cross-entropy, tokens that count), once all tiles were gathered."""
        unmasked = self.targets != IGNORE
        return torch.where(unmasked, self.lse - self.of_target, 0.0).sum(), unmasked.sum()


class TiledHead:
    """Logits and losses over the tiles of one weight. `chunk_bytes`: fp32 logits of one chunk of tokens over a tile."""

    def __init__(self, units: ModelParts, tiles: TiledParts, chunk_bytes: int) -> None:
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
    def bound(self, tensors: Sequence[Any], tile: torch.Tensor, rows: tuple[int, int]) -> Iterator[None]:
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

    def chunks(self, row: HeadRow, num_rows: int) -> Iterator[slice]:
        """Ranges of a row's tokens, such that their logits over so many rows of the weight may be held."""
        step = max(16, self.chunk_bytes // (4 * num_rows))
        for start in range(0, len(row.flat), step):
            yield slice(start, min(start + step, len(row.flat)))

    def tile_logits(self, piece: torch.Tensor, num_rows: int) -> torch.Tensor:
        """[n, H'] -> fp32 [n, num_rows], with a tile bound."""
        logits = self.units.parts.logits(piece[None]).float()
        if logits.shape != (1, len(piece), num_rows):
            raise StreamUnsupported(
                f"its head gives logits of shape {tuple(logits.shape)} for a tile of {num_rows} tokens of its "
                "vocabulary, so it cannot be computed in tiles"
            )
        return logits[0]

    @torch.no_grad()
    def gather(self, tensors: Sequence[Any], rows: list[HeadRow]) -> None:
        """Log-sum-exp and the targets' logits, over all tiles."""
        for number, tile in self.tiles.work.ring.tiles(self.matrix, "head forward"):
            first, last = self.matrix.rows(number)
            for row in rows:
                for at in self.chunks(row, last - first):
                    with self.bound(tensors, tile, (first, last)):
                        logits = self.tile_logits(row.flat[at].detach(), last - first)
                    largest = torch.maximum(row.largest[at], logits.amax(-1))
                    scaled = row.exp_sum[at] * (row.largest[at] - largest).exp()
                    row.exp_sum[at] = scaled + (logits - largest[:, None]).exp_().sum(-1)
                    row.largest[at] = largest
                    inside = (row.targets[at] >= first) & (row.targets[at] < last)
                    column = (row.targets[at] - first).clamp(0, last - first - 1)
                    of_target = logits.gather(1, column[:, None])[:, 0]
                    row.of_target[at] = torch.where(inside, of_target, row.of_target[at])

    @torch.no_grad()
    def losses(self, slab: torch.Tensor, inputs: Iterable[HeadInput]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(fp32 sum of the loss, tokens that count) of each batch."""
        tensors = self.tiles.tensors(self.units.head, slab)
        rows: list[HeadRow] = []
        for item in inputs:
            self.tiles.begin_forward(self.units.head)
            with bound(self.units.head.owners, tensors):
                rows.append(HeadRow.of(self.units.finish(item.hidden, item.batch, item.log), item.batch["labels"]))
        self.tiles.work.ring.restart("head")
        self.gather(tensors, rows)
        return [row.loss() for row in rows]

    @torch.no_grad()
    def logits(self, slab: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """[n, H'] -> fp32 [n, V]."""
        tensors = self.tiles.tensors(self.units.head, slab)
        found = []
        for number, tile in self.tiles.work.ring.tiles(self.matrix, "head forward"):
            first, last = self.matrix.rows(number)
            with self.bound(tensors, tile, (first, last)):
                found.append(self.tile_logits(flat, last - first))
        return torch.cat(found, dim=-1)
