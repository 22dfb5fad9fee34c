"""The loss of a micro-batch as a sum over its unmasked tokens, so that any split of the global batch adds up.

    objective of the global batch = sum over micro-batches of (CE_sum + n * aux) / N

with n the micro-batch's and N the global batch's unmasked tokens, CE_sum the summed cross-entropy in fp32, and aux the
micro-batch's mixture-of-experts balancing loss times its coefficient: it counts by the micro-batch's share of tokens,
so that another cut of the global batch changes little (transformers' Trainer adds it whole for each micro-batch, which
is `LossTerms.per_micro_batch`).

Logits [B*T, V] are never held whole: the decoder runs once, then the head, chunk by chunk, under a non-reentrant
checkpoint that recomputes each chunk in the backward pass (about a third more head FLOPs), with one gradient of the
head's weight for all chunks (`head_gradient`). The number of chunks does not depend on the data, so that ranks that
gather the head together (ZeRO-3) stay in step. Models that cannot be taken apart (encoder-decoders, own modules) run
whole, with the cross-entropy alone in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from outcore.model.forward import (
    IGNORE,
    Batch,
    CausalParts,
    HeadGradient,
    Isolation,
    forward_inputs,
    has_one_gradient,
    shifted_targets,
    unwrap,
)
from outcore.model.trial import USUAL_TERMS, LossTerms, aux_coefficient, mean_cross_entropy
from outcore.sizing.activations import auto_num_chunks

UserLoss = Callable[[nn.Module, Batch], Any]
"""loss(model, batch) -> mean over the micro-batch's unmasked tokens, or (sum, number of tokens)."""

HeadLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""loss(logits, labels) -> loss of each token: logits [n, V] in fp32, labels [n] the tokens to be predicted there."""


class SmoothedLoss:
    """Cross-entropy against targets of which `share` is spread evenly over the vocabulary, as transformers' Trainer has
    it."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of each token."""
        return nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=self.share)


@dataclass
class LossSum:
    """The loss of one micro-batch."""

    loss_sum: torch.Tensor
    """fp32 scalar, differentiable: cross-entropy summed over unmasked tokens."""
    n_tokens: torch.Tensor
    """int64 scalar on the loss's device: the unmasked tokens."""
    aux_loss: torch.Tensor | None = None
    """fp32 scalar, differentiable: auxiliary loss already times its coefficient; None where there is none."""
    is_aux_whole: bool = False
    """Whether the auxiliary loss counts whole, not by the micro-batch's share of tokens."""

    def objective(self, global_tokens: int | float | torch.Tensor) -> torch.Tensor:
        """This micro-batch's part of the global batch's mean loss: what backward runs on."""
        total = self.loss_sum
        if self.aux_loss is not None:
            total = total + self.aux_loss * (global_tokens if self.is_aux_whole else self.n_tokens)
        return total / global_tokens


def _device_of(model: nn.Module) -> torch.device | None:
    """Device where a batch must lie for this model: the device of a parameter (a partitioned one keeps its device)."""
    return next((p.device for p in model.parameters()), None)


def to_device(batch: Batch, device: torch.device | str | None) -> Batch:
    """The micro-batch on the device; tensors that are there already are not copied."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()} if device is not None else batch


def summed_loss(logits: torch.Tensor, targets: torch.Tensor, head_loss: HeadLoss | None = None) -> torch.Tensor:
    """Loss summed over the unmasked targets (fp32 scalar): cross-entropy, or the user's `head_loss` of each token.

    The user's function sees a token id everywhere (0 where there is no target); what it returns there counts nothing.
    RuntimeError when it does not return one number for each token."""
    logits, targets = logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1)
    if head_loss is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    counted = targets != IGNORE
    losses = head_loss(logits, targets.masked_fill(~counted, 0))
    if not isinstance(losses, torch.Tensor) or losses.shape != targets.shape:
        raise RuntimeError(
            f"Your loss(logits, labels) must return one loss for each of the {len(targets)} tokens; it returned "
            f"{type(losses).__name__}{f' of shape {tuple(losses.shape)}' if isinstance(losses, torch.Tensor) else ''}."
        )
    return torch.where(counted, losses.float(), 0.0).sum()


def chunked_ce_sum(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    num_chunks: int,
    head_loss: HeadLoss | None = None,
    head: nn.Module | None = None,
) -> torch.Tensor:
    """Summed cross-entropy or `head_loss` (fp32 scalar) of hidden [N, H] against targets [N], in `num_chunks` chunks.

    `logits_of`: hidden [1, n, H] -> logits [1, n, V]. With gradients on, each chunk is recomputed in the backward.
    `head`: the module of the projection in it, whose weight then gets one gradient for all chunks where possible."""
    num_chunks = min(num_chunks, hidden.shape[0])
    recompute = torch.is_grad_enabled() and num_chunks > 1
    if recompute and head is not None and has_one_gradient(head):
        logits_of = HeadGradient(head).around(logits_of)

    def one_chunk(hidden_chunk: torch.Tensor, target_chunk: torch.Tensor) -> torch.Tensor:
        return summed_loss(logits_of(hidden_chunk[None]), target_chunk, head_loss)

    total: torch.Tensor | None = None
    for hidden_chunk, target_chunk in zip(
        hidden.tensor_split(num_chunks), targets.tensor_split(num_chunks), strict=True
    ):
        if recompute:
            part = checkpoint(one_chunk, hidden_chunk, target_chunk, use_reentrant=False)
        else:
            part = one_chunk(hidden_chunk, target_chunk)
        assert isinstance(part, torch.Tensor)
        total = part if total is None else total + part
    assert total is not None
    return total


class TokenLoss:
    """Computes `LossSum` for a model. Holds settings and the model's parts; no weights of its own."""

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_fn: UserLoss | None = None,
        isolation: Isolation = "position_ids",
        chunked: bool = True,
        num_chunks: int | None = None,
        head_loss: HeadLoss | None = None,
        terms: LossTerms = USUAL_TERMS,
    ):
        """`model`: transformers, peft or own. `loss_fn`: the user's own loss of the whole model instead of
        cross-entropy; `head_loss`: of each token's logits. `terms`: what the model's own forward adds to its
        cross-entropy; for unknown ones it is run whole, with labels, and they are trained.

        `chunked`: False runs the model's whole forward (see `outcore.model.trial.abilities`). `num_chunks`: head chunks
        per micro-batch; None: from the batch's size and LOGITS_CHUNK_BYTES. Several ranks under ZeRO-3 need equal
        numbers, so give one there if the micro-batches of the ranks differ in length."""
        base = unwrap(model)
        self.config = getattr(base, "config", None)
        self.encoder_decoder = bool(getattr(self.config, "is_encoder_decoder", False))
        self.loss_fn = loss_fn
        self.head_loss = head_loss
        self.isolation: Isolation = isolation
        self.num_chunks = num_chunks
        self.terms = terms
        self.base = base
        self.parts: CausalParts | None = None
        if chunked and loss_fn is None and not self.encoder_decoder and hasattr(self.config, "to_dict"):
            self.parts = CausalParts(base)

    @property
    def aux_coefficient(self) -> float:
        """Weight of the router's balancing loss; 0: it is off."""
        return aux_coefficient(self.base) if self.terms.balances else 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """The loss of one micro-batch (moved to the model's device first). Differentiable when gradients are on."""
        batch = to_device(batch, _device_of(model))
        if self.loss_fn is not None:
            return self._user_loss(model, batch)
        if self.parts is not None:
            return self._chunked(self.parts, batch)
        return self._whole(model, batch)

    def _chunked(self, parts: CausalParts, batch: Batch) -> LossSum:
        targets = shifted_targets(batch["labels"]).reshape(-1)
        inputs = forward_inputs(parts.decoder, batch, self.isolation)
        coefficient = self.aux_coefficient
        if coefficient and torch.is_grad_enabled():
            inputs["output_router_logits"] = True
        output = parts.decoder(**inputs)
        hidden = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
        aux = None
        if coefficient and torch.is_grad_enabled():
            aux = coefficient * parts.router_loss(hidden, output.router_logits, batch.get("attention_mask")).float()
        hidden = hidden.reshape(-1, hidden.shape[-1])
        num_chunks = self.num_chunks or auto_num_chunks(hidden.shape[0], self._vocab_size())
        loss_sum = chunked_ce_sum(hidden, targets, parts.logits, num_chunks, self.head_loss, parts.projection)
        return LossSum(loss_sum, (targets != IGNORE).sum(), aux, self.terms.per_micro_batch)

    def _whole(self, model: nn.Module, batch: Batch) -> LossSum:
        labels = batch["labels"]
        if self.encoder_decoder:
            inputs: dict[str, Any] = {
                key: batch[key] for key in ("input_ids", "attention_mask") if batch.get(key) is not None
            }
            inputs["decoder_input_ids"] = self.base.prepare_decoder_input_ids_from_labels(labels=labels)  # pyright: ignore[reportCallIssue]
            inputs["use_cache"] = False
            targets = labels
        else:
            inputs, targets = forward_inputs(self.base, batch, self.isolation), shifted_targets(labels)
        coefficient = self.aux_coefficient if torch.is_grad_enabled() else 0.0
        if coefficient and not self.encoder_decoder:
            inputs["output_router_logits"] = True
        with_own = self.terms.unknown and self.head_loss is None and torch.is_grad_enabled()
        with_own = with_own and bool((targets != IGNORE).any())
        if with_own:
            inputs["labels"] = labels
        output: Any = model(**inputs)
        logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
            raise RuntimeError(
                f"{type(self.base).__name__} returned {type(output).__name__} without logits [B, T, V]. Return logits, "
                "an object with .logits, or give your own loss function from the model_module hook."
            )
        aux = getattr(output, "aux_loss", None)
        aux = coefficient * aux.float() if coefficient and aux is not None else None
        if with_own:  # all of them, the balancing loss too
            aux = cast(Any, output).loss.float() - mean_cross_entropy(logits, targets)
        flat, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        num_chunks = self.num_chunks or auto_num_chunks(flat.shape[0], flat.shape[1])
        loss_sum = chunked_ce_sum(flat, targets, lambda chunk: chunk, num_chunks, self.head_loss)
        return LossSum(loss_sum, (targets != IGNORE).sum(), aux, self.terms.per_micro_batch)

    def _user_loss(self, model: nn.Module, batch: Batch) -> LossSum:
        assert self.loss_fn is not None
        labels = batch["labels"] if self.encoder_decoder else batch["labels"][:, 1:]
        n_tokens = (labels != IGNORE).sum()
        empty = int(n_tokens) == 0
        result = self.loss_fn(model, _with_some_target(batch) if empty else batch)
        if isinstance(result, tuple) and len(result) == 2:
            loss_sum, own_n = result
            own_n = torch.as_tensor(own_n, device=n_tokens.device)
            if not empty and int(own_n) != int(n_tokens):
                raise RuntimeError(
                    f"Your loss function counted {int(own_n)} tokens, the batch has {int(n_tokens)} unmasked ones. "
                    "Labels are not shifted and -100 means no loss; count (labels[:, 1:] != -100)."
                )
        else:
            loss_sum = result * n_tokens if isinstance(result, torch.Tensor) else result
        if not isinstance(loss_sum, torch.Tensor) or loss_sum.ndim != 0:
            raise RuntimeError(
                "Your loss function must return a scalar tensor (the mean over the micro-batch's unmasked tokens) or "
                f"a pair (sum, number of tokens); it returned {type(result).__name__}"
                f"{f' of shape {tuple(result.shape)}' if isinstance(result, torch.Tensor) else ''}."
            )
        return LossSum(loss_sum.float() * 0.0 if empty else loss_sum.float(), n_tokens)

    def _vocab_size(self) -> int:
        config = self.config
        text = config.get_text_config(decoder=True) if config is not None else None
        return int(getattr(text, "vocab_size", 0) or 32768)


def _with_some_target(batch: Batch) -> Batch:
    """A batch without targets gets some, so that a mean is finite; the caller weighs the result with zero."""
    return {
        **batch,
        "labels": batch["input_ids"].clone()
        if batch["labels"].shape == batch["input_ids"].shape
        else batch["labels"].clamp(min=0),
    }


class LossModule(nn.Module):
    """Model and loss as one module, for engines that wrap a module's forward (DeepSpeed): hooks see every call."""

    def __init__(self, network: nn.Module, token_loss: TokenLoss):
        super().__init__()
        self.network = network
        self.token_loss = token_loss

    def forward(self, batch: Batch, global_tokens: float = 1.0) -> Any:
        """-> (objective for backward, detached fp32 cross-entropy sum, number of unmasked tokens).

        A "batch" without labels is taken as arguments of the network's own forward, which is run and its output
        returned: sampling goes through the same root module as training, as ZeRO-3's bookkeeping wants it."""
        if "labels" not in batch:
            return self.network(**batch)
        result = self.token_loss(self.network, batch)
        return result.objective(global_tokens), result.loss_sum.detach(), result.n_tokens
