"""Sample text while training: one whole forward per token, no cache, the same on every rank.

Meant for a short look at what the model says, not for serving: cost grows with the square of the length. Works with
partitioned weights (ZeRO-3): all ranks call it together and run the same number of forwards."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from outcore.model.forward import accepted_names, unwrap
from outcore.model.loss import LossModule
from outcore.model.source import max_positions

CONTEXT_LENGTH = 512
"""Tokens that sampling looks back: it is for a short look, and each token costs as much as all of them."""


def context_length_of(model: nn.Module) -> int:
    """`CONTEXT_LENGTH`, or fewer where the model knows fewer positions."""
    config = getattr(unwrap(model), "config", None)
    limit = max_positions(config) if isinstance(config, PreTrainedConfig) else None
    return min(CONTEXT_LENGTH, limit or CONTEXT_LENGTH)


@torch.no_grad()
def generate_tokens(
    model: nn.Module,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    *,
    end_tokens: Collection[int] | None = None,
) -> torch.Tensor:
    """Continue input_ids [1, T] by the likeliest token each time; returns the new tokens [n], n <= max_new_tokens, up
    to and with one of `end_tokens`.

    Only the last `context_length_of(model)` tokens are looked at. After an end token the forwards go on (ranks must
    stay in step), their tokens are dropped. The model's training mode is left as it was."""
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(
            f"generate_tokens continues one prompt [1, T] of at least one token, got {list(input_ids.shape)}."
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    context_length = context_length_of(model)
    base, root = unwrap(model), _root(model)
    config = getattr(base, "config", None)
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    device = next(base.parameters()).device
    prompt = input_ids.to(device)
    tokens = torch.full((1, 1), _start_token(config), device=device) if encoder_decoder else prompt
    new_tokens: list[int] = []
    was_training = base.training
    base.eval()
    try:
        for _ in range(max_new_tokens):
            window = tokens[:, -context_length:]
            inputs = {"input_ids": prompt, "decoder_input_ids": window} if encoder_decoder else {"input_ids": window}
            logits = _last_logits(base, root, inputs)
            new_tokens.append(int(logits.argmax()))
            tokens = torch.cat([tokens, torch.full((1, 1), new_tokens[-1], device=device)], dim=1)
    finally:
        base.train(was_training)
    last = next((i for i, token in enumerate(new_tokens) if token in (end_tokens or ())), len(new_tokens))
    return torch.tensor(new_tokens[: last + 1], dtype=torch.long)


def _start_token(config: Any) -> int:
    for name in ("decoder_start_token_id", "pad_token_id", "bos_token_id"):
        if isinstance(getattr(config, name, None), int):
            return getattr(config, name)
    return 0


def _root(model: nn.Module) -> nn.Module:
    """The outermost module below an engine: ZeRO-3 starts a new round of its bookkeeping where that is called."""
    inner = model._modules.get("module")
    return inner if type(model).__name__ == "DeepSpeedEngine" and inner is not None else model


def _last_logits(base: nn.Module, root: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Logits [V] of the last position: for causal models the head sees that position only."""
    names, _ = accepted_names(base)
    if "use_cache" in names:
        inputs = {**inputs, "use_cache": False}
    if "logits_to_keep" in names:
        inputs = {**inputs, "logits_to_keep": 1}
    output = root(inputs) if isinstance(root, LossModule) else root(**inputs)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return logits[0, -1]
