"""What goes into a pass and what comes out: calls, hooks between parts, outputs.

B: rows, T: tokens of a row, H: hidden size, V: vocabulary, N = B x T."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from outcore.flow.parts import Part

Want = Literal["nothing", "hidden", "logits", "labels", "loss", "logprobs"]
"""nothing: the pass ends below the head. hidden: the decoder's result. logits: of the positions asked for. labels:
the same by the head's matrix alone, without what a language model does to its logits. loss: the
sum over the tokens that have a label. logprobs: how likely each token with a label was after those before it."""
OnPart = Callable[[Part, int, torch.Tensor], torch.Tensor | None]
"""(part, call number, hidden_BTH on flow's compute stream), after the embedding and after each layer. The tensor is
flow's until the hook returns; a returned tensor replaces it; an exception aborts the pass."""


@dataclass(frozen=True)
class Call:
    """Rows that go through the model together."""

    batch: Mapping[str, torch.Tensor]
    """On the device: input_ids [B, T], perhaps position_ids or attention_mask [B, T], labels [B, T] for a loss or for
    logprobs."""
    want: Want = "logits"
    positions: torch.Tensor | None = None
    """Places among the N tokens whose logits are wanted. None: the last token of each row."""
    num_top: int = 1
    """With logprobs: so many likeliest tokens of each place."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the decoder beside the batch's, such as a cache of keys and values; they win over the batch's."""


@dataclass
class Output:
    """What one call gave."""

    number: int
    """The call's place among the calls of its pass."""
    hidden: torch.Tensor | None = None
    """[B, T, H'], after whatever the decoder does behind its last layer."""
    logits: torch.Tensor | None = None
    """fp32 [positions, V]."""
    ce_sum: torch.Tensor | None = None
    """fp32 scalar: loss summed over the tokens that count."""
    n_tokens: torch.Tensor | None = None
    """int64 scalar: the tokens that count."""
    logprobs: torch.Tensor | None = None
    """fp32 [B, T]: natural logarithm of each token's probability; 0 where it has no label."""
    top_ids: torch.Tensor | None = None
    """int64 [B, T, num_top]: the likeliest tokens there, and in `top_logprobs` their logarithms."""
    top_logprobs: torch.Tensor | None = None
