"""Sample text while training: one whole forward per token, no cache, the same on every rank.

Meant for a short look at what the model says, not for serving: cost grows with the square of the length. Works with
partitioned weights (ZeRO-3): all ranks call it together, run the same number of forwards and draw the same tokens."""

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
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    end_tokens: Collection[int] | None = None,
    context_length: int | None = None,
) -> torch.Tensor:
    """Continue input_ids [1, T]; returns the new tokens [n], n <= max_new_tokens, up to and with one of `end_tokens`.

    temperature 0: the likeliest token each time; above: drawn with `seed` on the CPU, from the `top_k` likeliest if
    given. Only the last `context_length` tokens are looked at (None: `context_length_of` the model). After such a
    token the forwards go on (ranks must stay in step), their tokens are dropped. The model's training mode and RNG
    streams are left as they were."""
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(
            f"generate_tokens continues one prompt [1, T] of at least one token, got {list(input_ids.shape)}."
        )
    context_length = context_length_of(model) if context_length is None else context_length
    if max_new_tokens < 1 or context_length < 1 or temperature < 0 or top_k < 0:
        raise ValueError("max_new_tokens and context_length must be at least 1, temperature and top_k at least 0.")
    base, root = unwrap(model), _root(model)
    config = getattr(base, "config", None)
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    device = next(base.parameters()).device
    prompt = input_ids.to(device)
    tokens = torch.full((1, 1), _start_token(config), device=device) if encoder_decoder else prompt
    generator = torch.Generator().manual_seed(seed)
    new_tokens: list[int] = []
    was_training = base.training
    base.eval()
    try:
        for _ in range(max_new_tokens):
            window = tokens[:, -context_length:]
            inputs = {"input_ids": prompt, "decoder_input_ids": window} if encoder_decoder else {"input_ids": window}
            logits = _last_logits(base, root, inputs)
            new_tokens.append(_choose(logits.float().cpu(), temperature, top_k, generator))
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


def _choose(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
