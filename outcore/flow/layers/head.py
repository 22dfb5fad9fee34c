"""The head, forward: the decoder's result, logits of some positions, and the loss of all, chunk by chunk of its logits.

The logits of one chunk are all that is ever held; over a vocabulary in tiles (`tiled_head`) not even these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from outcore.flow.layers.runner import HeadInput, PartRunner
from outcore.flow.layers.tiled_head import TiledHead
from outcore.flow.layers.unit_weights import in_place
from outcore.flow.parts import StreamUnsupported
from outcore.model import HeadLoss, summed_loss
from outcore.model.forward import IGNORE, shifted_targets
from outcore.sizing.activations import LOGITS_CHUNK_BYTES, LOSS_CHUNKS, auto_num_chunks


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
        self.units, self.weights, tiles = runner.units, runner.weights, runner.tiles
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
        with in_place(self.units.head, self.weights.tensors(self.units.head, slab)):
            return self.units.finish(item.hidden, item.batch, item.log)

    def logits(self, slab: torch.Tensor, item: HeadInput, positions: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [n, V] of the tokens at these places among N; None: of the last token of each row."""
        with in_place(self.units.head, self.weights.tensors(self.units.head, slab)):
            final = self.units.finish(item.hidden, item.batch, item.log)
            flat = final[:, -1] if positions is None else final.reshape(-1, final.shape[-1])[positions]
            if self.tiled is not None:
                return self.tiled.logits(slab, flat)
            return self.units.parts.logits(flat[None])[0].float()

    def losses(self, slab: torch.Tensor, inputs: Iterable[HeadInput]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(fp32 sum of the loss, tokens that count) of each batch, one after another as they are asked for; in tiles
        all at once with the first."""
        if self.tiled is not None:
            yield from self.tiled.losses(slab, inputs)
            return
        for item in inputs:
            found = self._loss(slab, item)
            del item  # its hidden states are not needed any more
            yield found

    def logprobs(
        self, slab: torch.Tensor, item: HeadInput, num_top: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give each token that has a label its fp32 log-probability [B, T], and at its place the likeliest tokens and
        theirs [B, T, num_top]; chunk by chunk. StreamUnsupported where the vocabulary comes in tiles."""
        if self.tiled is not None:
            raise StreamUnsupported("log-probabilities need all logits of a token, and the head is computed in tiles")
        labels = item.batch["labels"]
        targets = shifted_targets(labels).reshape(-1)
        logprobs = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
        top_logprobs = logprobs.new_zeros((len(targets), num_top))
        top_ids = torch.zeros_like(top_logprobs, dtype=torch.long)
        with in_place(self.units.head, self.weights.tensors(self.units.head, slab)):
            final = self.units.finish(item.hidden, item.batch, item.log)
            flat = final.reshape(-1, final.shape[-1])
            start = 0
            for target in targets.tensor_split(self.num_chunks(len(flat), LOSS_CHUNKS)):
                here = slice(start, start + len(target))
                logits = self.units.parts.logits(flat[here][None])[0].float()
                total = logits.logsumexp(-1, keepdim=True)
                own = logits.gather(-1, target.clamp_min(0)[:, None])
                logprobs[here] = (own - total)[:, 0].where(target != IGNORE, 0.0)
                values, top_ids[here] = logits.topk(num_top, dim=-1)
                top_logprobs[here] = values - total
                start += len(target)
        shape = labels.shape
        # From the place that predicts to the token itself.
        return (
            logprobs.view(shape).roll(1, 1),
            top_ids.view(*shape, -1).roll(1, 1),
            top_logprobs.view(*shape, -1).roll(1, 1),
        )

    def _loss(self, slab: torch.Tensor, item: HeadInput) -> tuple[torch.Tensor, torch.Tensor]:
        targets = shifted_targets(item.batch["labels"]).reshape(-1)
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
        """How many chunks so many tokens are cut into; `smaller`: so many times less memory than `logits_chunk_bytes`
        for each."""
        return min(num_tokens, auto_num_chunks(num_tokens, self.vocab_size, max(1, self.logits_chunk_bytes // smaller)))
