"""Cross-entropy of one chunk of logits and its gradient at once; autograd makes many passes over fp32 copies of it.

The gradient of the sum over tokens is softmax minus one at the target: known as soon as the logits are, so nothing has
to be kept between forward and backward. Through torch.compile it takes two passes over the 16-bit logits and writes a
16-bit gradient, and no fp32 copy exists. Eagerly one fp32 copy is worked on in place. Memory beside the logits, in
fp32 logits of the chunk: 0.5 compiled, 1.5 eagerly (copy and 16-bit gradient); with the 16-bit logits 1 and 2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from outcore.model.forward import IGNORE

logger = logging.getLogger(__name__)

Pair = tuple[torch.Tensor, torch.Tensor]


def sum_and_gradient(logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor) -> Pair:
    """(fp32 sum of the cross-entropy over targets [n] that are not IGNORE, `scale` times its gradient).

    logits [n, V] of any float type; arithmetic in fp32, the gradient in the logits' type. `scale`: fp32 scalar.
    """
    wide = logits.float()
    lse = torch.logsumexp(wide, dim=-1, keepdim=True)
    counted = (targets != IGNORE)[:, None]
    column = targets.clamp(min=0)[:, None]
    loss = torch.where(counted, lse - wide.gather(1, column), 0.0).sum()
    at_target = torch.arange(logits.shape[1], device=logits.device)[None] == column
    grad = torch.where(counted, ((wide - lse).exp() - at_target.float()) * scale, 0.0)
    return loss, grad.to(logits.dtype)


@torch.no_grad()
def sum_and_gradient_eager(logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor) -> Pair:
    """Compute `sum_and_gradient` without a compiler that fuses it: in place on one fp32 copy of the logits.

    `torch.logsumexp` makes a second copy for its exponentials. These are its own steps (torch 2.13), done in the first
    copy, which the logits then fill again: the same bits, one pass more.
    """
    wide = logits.float() if logits.dtype != torch.float32 else logits.clone()
    largest = wide.amax(dim=-1, keepdim=True)
    largest.masked_fill_(largest.abs() == torch.inf, 0.0)
    lse = wide.sub_(largest).exp_().sum(dim=-1, keepdim=True).log_().add_(largest)
    counted = (targets != IGNORE)[:, None]
    column = targets.clamp(min=0)[:, None]
    loss = torch.where(counted, lse - logits.gather(1, column).float(), 0.0).sum()
    grad = wide.copy_(logits).sub_(lse).exp_()
    grad.scatter_add_(1, column, torch.full_like(lse, -1.0))
    grad.mul_(torch.where(counted, scale, 0.0))
    return loss, grad.to(logits.dtype)


class CrossEntropy:
    """`sum_and_gradient`, compiled where that is wanted; when compilation fails it goes on eagerly and says so once."""

    def __init__(self, *, compiled: bool, backend: str | Callable[..., Any] = "inductor") -> None:
        self._compiled = torch.compile(sum_and_gradient, fullgraph=True, backend=backend) if compiled else None
        self.why_not = "" if compiled else "not asked for"

    @property
    def is_compiled(self) -> bool:
        """Until compiling fails."""
        return self._compiled is not None

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor, scale: float) -> Pair:
        """(fp32 sum over the targets that count, gradient [n, V] in the logits' type) for logits [n, V]."""
        factor = torch.full((), scale, dtype=torch.float32, device=logits.device)
        if self._compiled is not None:
            from outcore.flow.layers import compiler_errors

            try:
                with torch.no_grad():
                    return self._compiled(logits, targets, factor)
            except compiler_errors() as error:
                self._compiled = None
                self.why_not = f"{type(error).__name__}: {' '.join(str(error).split()[:40])}"
                logger.warning("the loss is computed eagerly: %s", self.why_not)
        return sum_and_gradient_eager(logits, targets, factor)
