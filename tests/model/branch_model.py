"""An own model whose branches are switched by the batch: the first token's bits say which of them run.

A branch that does not run gets no gradient at all in that backward pass.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

VOCAB = 128
WIDTH = 64


class Branched(nn.Module):
    """input_ids [B, T] -> logits [B, T, V]. No bias, which DeepSpeed adds with a rounding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
        self.scales = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        code = int(input_ids[0, 0])
        for bit, (branch, scale) in enumerate(zip(self.branches, self.scales, strict=True)):
            if code >> bit & 1:
                x = x + torch.tanh(scale(branch(x)[..., None])[..., 0])
        return self.head(x)


def build(config: Mapping[str, Any], tokenizer: Any) -> nn.Module:
    torch.manual_seed(7)
    return Branched()


def coded_batch(code: int, rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """A micro-batch that runs the branches of `code`."""
    ids = torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    ids[:, 0] = code
    return {"input_ids": ids, "labels": ids.clone()}


def coded_batches(codes: list[int], step: int, rows: int = 2, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of a step, one for each code."""
    return [coded_batch(code, rows, length, seed=100 * step + micro) for micro, code in enumerate(codes)]
