"""Parameters that the loss of a language model never reaches: an indexer that only picks tokens, cross-attention of a
decoder that is trained without an encoder.

torch's AdamW leaves a parameter without a gradient alone. An engine that keeps gradients in one flat buffer sees zeros
there, and would shrink it by weight decay. So such parameters are found on the tiny copy, by one backward pass, and
frozen in the model: they cost no gradient and no states either. Names are compared with their numbers left out, and all
that share such a pattern must be without a gradient: an expert that got no token in the trial is trained as its
siblings are.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from outcore.model.facts import checkpoint_name
from outcore.model.forward import forward_inputs
from outcore.model.trial.shrink import VOCAB


def pattern_of(name: str) -> str:
    """A parameter's name with a star for each number: equal for all layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", checkpoint_name(name))


def without_gradient(tiny: nn.Module) -> frozenset[str]:
    """Patterns of the trainable parameters that get no gradient from the logits or a balancing loss."""
    ids = torch.randint(2, VOCAB, (2, 24), generator=torch.Generator().manual_seed(4))
    named = {name: p for name, p in tiny.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        output: Any = tiny(**forward_inputs(tiny, {"input_ids": ids}))
        total = output.logits.float().square().mean()
        aux = getattr(output, "aux_loss", None)
        if isinstance(aux, torch.Tensor) and aux.requires_grad:
            total = total + aux
        grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    reached: defaultdict[str, bool] = defaultdict(bool)
    for name, grad in zip(named, grads, strict=True):
        reached[pattern_of(name)] |= grad is not None
    return frozenset(pattern for pattern, is_reached in reached.items() if not is_reached)


def freeze(model: nn.Module, patterns: frozenset[str]) -> list[str]:
    """Freeze the parameters of these patterns; their names."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and pattern_of(name) in patterns}
    for p in found.values():
        p.requires_grad_(False)
    return list(found)
