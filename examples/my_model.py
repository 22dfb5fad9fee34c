"""Your own model with your own loss: train it with

    python train_model.py --model_module examples/my_model.py:build

The contract is two functions, and nothing here imports outcore:

    build(config, tokenizer) -> model, or (model, loss)
    loss(model, batch) -> mean over the unmasked tokens, or (sum, number of tokens)

The model below is a small recurrent network (a gated linear recurrence, computed in parallel over the sequence), which
no library ships; its loss is cross-entropy with label smoothing and a z-loss that keeps the logits from drifting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class GatedRecurrence(nn.Module):
    """h_t = a_t * h_{t-1} + (1 - a_t) * v_t for each channel, then gated; x [B, T, C] -> [B, T, C]."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, keep, gate = self.inputs(self.norm(x)).chunk(3, dim=-1)
        # Kept between 0.5 and 0.99 a step, so that the products below stay within fp32 over a block of 64 steps.
        keep = 0.5 + 0.49 * torch.sigmoid(keep.float())
        state = x.new_zeros(x.shape[0], x.shape[2], dtype=torch.float32)
        blocks = []
        for value_block, keep_block in zip(value.float().split(64, dim=1), keep.split(64, dim=1), strict=True):
            decay = keep_block.log().cumsum(dim=1).exp()  # [B, t, C] product of keep from the block's start
            fresh = ((1 - keep_block) * value_block / decay).cumsum(dim=1)
            blocks.append(decay * (state[:, None] + fresh))
            state = blocks[-1][:, -1]
        return x + self.output(torch.cat(blocks, dim=1).to(x.dtype) * F.silu(gate))


class RecurrentLM(nn.Module):
    """Embedding, recurrences, tied head: input_ids [B, T] -> logits [B, T, V]."""

    def __init__(self, vocab_size: int, width: int = 256, depth: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList([GatedRecurrence(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embedding.weight.T


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Label-smoothed cross-entropy plus z-loss: (sum over unmasked tokens, their number).

    `batch["labels"]` [B, T] is not shifted, -100 means no loss. A sum and a number add up exactly over micro-batches;
    a mean would be weighted by the number of tokens instead, which comes to the same.
    """
    logits = model(batch["input_ids"])[:, :-1].float()
    targets = batch["labels"][:, 1:]
    wanted = targets != -100
    logits, targets = logits[wanted], targets[wanted]  # [n, V], [n]
    cross_entropy = F.cross_entropy(logits, targets, label_smoothing=0.05, reduction="sum")
    z_loss = 1e-4 * logits.logsumexp(dim=-1).square().sum()
    return cross_entropy + z_loss, wanted.sum()


def build(config: Mapping[str, Any], tokenizer: Any) -> tuple[nn.Module, Any]:
    """Called once with the run's model settings and the tokenizer. `config["config_overrides"]` is yours to use."""
    own = {"width": 256, "depth": 4, **config["config_overrides"]}
    model = RecurrentLM(config["vocab_size"] or len(tokenizer), width=own["width"], depth=own["depth"])
    return model, loss
