"""The head, forward: the decoder's result, logits of some positions, and the loss of all, chunk by chunk of its logits.

The logits of one chunk are all that is ever held; over a vocabulary in tiles (`tiled_head`) not even these.

The head over a vocabulary in tiles: neither its weight nor the logits of all tokens exist on the device.

The model's own head runs with a tile of the weight (and of a bias) in place of the whole, which gives a tile of the
logits, soft-capping and scaling included. One pass over the tiles gathers the log-sum-exp of each token's logits online
(running maximum and sum) and the target's logit. It takes all batches and chunks of tokens before the next tile, so the
weight comes up once. Cost: the last hidden states of all batches are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from outcore.flow.layers.runner import HeadInput, PartRunner
from outcore.flow.layers.unit_weights import in_place
from outcore.flow.parts import LayerCall, ModelParts, StreamUnsupported, bound
from outcore.flow.tiles import TiledMatrix, TiledParts
from outcore.model import HeadLoss, summed_loss
from outcore.model.forward import IGNORE, shifted_targets
from outcore.sizing.activations import FUSED_CHUNKS, LOGITS_CHUNK_BYTES, LOSS_CHUNKS, auto_num_chunks


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
        """Make the head's input from the decoder's result [B, T, H']."""
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
        """Bind a tile in the vocabulary's place, and the same rows of its bias, while the context lasts."""
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
        """Yield ranges of a row's tokens whose logits over `num_rows` rows of the weight fit `chunk_bytes`."""
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


class Head:
    """The end of a model. `head_loss`: of each token, instead of cross-entropy. StreamUnsupported where that cannot be
    computed over a vocabulary in tiles."""

    def __init__(
        self,
        runner: PartRunner,
        *,
        vocab_size: int,
        logits_chunk_bytes: int = LOGITS_CHUNK_BYTES,
        head_loss: HeadLoss | None = None,
    ) -> None:
        self.runner, self.units, self.weights, tiles = runner, runner.units, runner.weights, runner.tiles
        self.vocab_size, self.logits_chunk_bytes, self.head_loss = vocab_size, logits_chunk_bytes, head_loss
        is_tiled = tiles is not None and self.units.head in tiles
        self.tiled = TiledHead(self.units, tiles, logits_chunk_bytes) if tiles is not None and is_tiled else None
        if head_loss is not None and self.tiled is not None:
            raise StreamUnsupported(
                "its own loss(logits, labels) needs all logits of a token, and its head is computed in tiles of the "
                "vocabulary: raise tile_bytes"
            )

    def finish(self, slab: torch.Tensor, item: HeadInput) -> torch.Tensor:
        """[B, T, H'], what the decoder makes of its last layer's output."""
        item = self.on_device(item)
        with in_place(self.units.head, self.weights.tensors(self.units.head, slab)):
            return self.units.finish(item.hidden, item.batch, item.log)

    def logits(
        self, slab: torch.Tensor, item: HeadInput, positions: torch.Tensor | None = None, *, as_made: bool = False
    ) -> torch.Tensor:
        """fp32 [n, V] of the tokens at these places among N; None: of the last token of each row. `as_made`: of the
        type that the head gives, for who converts them himself."""
        item = self.on_device(item, only_last=positions is None)
        with in_place(self.units.head, self.weights.tensors(self.units.head, slab)):
            final = self.units.finish(item.hidden, item.batch, item.log)
            flat = final[:, -1] if positions is None else final.reshape(-1, final.shape[-1])[positions]
            if self.tiled is not None:
                return self.tiled.logits(slab, flat)
            found = self.units.parts.logits(flat[None])[0]
            return found if as_made else found.float()

    def labels(self, slab: torch.Tensor, item: HeadInput, positions: torch.Tensor) -> torch.Tensor:
        """fp32 [n, labels] of the tokens at these places among N, by the head's matrix alone."""
        item, projection = self.on_device(item), self.units.parts.projection
        assert projection is not None, "a model that classifies is loaded with its labels as the head"
        with in_place(self.units.head, self.weights.tensors(self.units.head, slab)):
            final = self.units.finish(item.hidden, item.batch, item.log)
            return projection(final.reshape(-1, final.shape[-1])[positions]).float()

    def losses(self, slab: torch.Tensor, inputs: Iterable[HeadInput]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (fp32 sum of the loss, tokens that count) of each batch when it is asked for. In tiles all are computed
        with the first."""
        if self.tiled is not None:
            yield from self.tiled.losses(slab, map(self.on_device, inputs))
            return
        for item in inputs:
            found = [self._loss(slab, piece) for _, piece in self.pieces(item)]
            del item  # its hidden states are not needed any more
            ce_sum, n_tokens = (torch.stack(parts).sum(0) for parts in zip(*found, strict=True))
            yield ce_sum, n_tokens

    def pieces(self, item: HeadInput) -> Iterator[tuple[slice, HeadInput]]:
        """Yield the whole input, or for long rows slices of tokens whose hidden states come from RAM."""
        long_rows = self.runner.takes_long(item.hidden)
        if long_rows is None:
            yield slice(None), item
            return
        targets = shifted_targets(item.batch["labels"])
        for tile in long_rows.tiles(LayerCall((), {}), item.hidden):
            yield tile.tokens, item.cut(tile.tokens, tile.hidden, targets)

    def on_device(self, item: HeadInput, *, only_last: bool = False) -> HeadInput:
        """Have hidden states whole on the device, or there `only_last` of each row, wherever they live."""
        long_rows = self.runner.takes_long(item.hidden)
        if long_rows is None:
            return item
        if only_last:
            length = item.hidden.shape[1]
            return item.cut(slice(length - 1, length), long_rows.homes.up(item.hidden[:, -1:]))
        return replace(item, hidden=long_rows.homes.up(item.hidden))

    def logprobs(self, slab: torch.Tensor, item: HeadInput, num_top: int = 1) -> tuple[torch.Tensor, ...]:
        """Give each token that has a label its fp32 log-probability [B, T], at its place the likeliest tokens and
        theirs [B, T, num_top], and its own rank [B, T] where more than the likeliest one is asked for (else 0); chunk
        by chunk. StreamUnsupported where the vocabulary comes in tiles."""
        if self.tiled is not None:
            raise StreamUnsupported("log-probabilities need all logits of a token, and the head is computed in tiles")
        item, labels = self.on_device(item), item.batch["labels"]
        targets = item.flat_targets()
        logprobs = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
        top_logprobs = logprobs.new_zeros((len(targets), num_top))
        top_ids = torch.zeros_like(top_logprobs, dtype=torch.long)
        ranks = torch.zeros_like(targets)
        with in_place(self.units.head, self.weights.tensors(self.units.head, slab)):
            final = self.units.finish(item.hidden, item.batch, item.log)
            flat = final.reshape(-1, final.shape[-1])
            start, judge, smaller, compiled = 0, likelihoods, LOSS_CHUNKS, self.runner.compiled
            if num_top == 1 and compiled is not None and not compiled.why_not:
                judge, smaller = partial(compiled.fused, likelihoods), FUSED_CHUNKS
            for target in targets.tensor_split(self.num_chunks(len(flat), smaller)):
                here = slice(start, start + len(target))
                logits = self.units.parts.logits(flat[here][None])[0]
                logprobs[here], top_ids[here], top_logprobs[here] = judge(logits, target, num_top)
                if num_top > 1:
                    own = logits.gather(-1, target.clamp_min(0)[:, None])
                    ranks[here] = (logits > own).sum(-1) + 1
                start += len(target)
        shape = labels.shape
        # From the place that predicts to the token itself.
        return (
            logprobs.view(shape).roll(1, 1),
            top_ids.view(*shape, -1).roll(1, 1),
            top_logprobs.view(*shape, -1).roll(1, 1),
            ranks.view(shape).roll(1, 1),
        )

    def _loss(self, slab: torch.Tensor, item: HeadInput) -> tuple[torch.Tensor, torch.Tensor]:
        targets = item.flat_targets()
        n_tokens = (targets != IGNORE).sum()
        with in_place(self.units.head, self.weights.tensors(self.units.head, slab)):
            final = self.units.finish(item.hidden, item.batch, item.log)
            flat = final.reshape(-1, final.shape[-1])
            ce_sum = torch.zeros((), dtype=torch.float32, device=flat.device)
            start = 0
            for target in targets.tensor_split(self.num_chunks(len(flat), LOSS_CHUNKS)):
                logits = self.units.parts.logits(flat[start : start + len(target)][None])
                ce_sum += summed_loss(logits, target, self.head_loss)
                start += len(target)
        return ce_sum, n_tokens

    def num_chunks(self, num_tokens: int, smaller: int) -> int:
        """Number of chunks into which these tokens are cut. `smaller`: divisor of `logits_chunk_bytes` for each
        chunk."""
        return min(num_tokens, auto_num_chunks(num_tokens, self.vocab_size, max(1, self.logits_chunk_bytes // smaller)))


def likelihoods(
    logits: torch.Tensor, targets: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For logits [n, V] the targets' fp32 log-probabilities [n] (0 where there is none), the likeliest tokens and
    theirs [n, num_top]. Compiled, the likeliest one is found without logits in fp32 in memory."""
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(-1, targets.clamp_min(0)[:, None]) - total
    values, ids = logits.max(-1, keepdim=True) if num_top == 1 else logits.topk(num_top, dim=-1)
    return own[:, 0].where(targets != IGNORE, 0.0), ids, values - total
