"""One gradient of the head's weight for all chunks of a micro-batch's loss, where autograd would hold two.

Autograd multiplies out each chunk's gradient and then adds it to the sum so far: both are whole matrices, vocabulary x
hidden. Here each chunk's backward adds its product to one buffer as it multiplies (addmm: one rounding a chunk instead
of two), and a node that all chunks hang on by a scalar hands the buffer to the weight once they are through. The head
keeps its own code and hooks (ZeRO-3 gathers its weight around them): only `nn.Linear.forward` is replaced, for the time
of a chunk. Anything but a plain, trained `nn.Linear`, and a head under autocast, is left to autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable


def has_one_gradient(head: nn.Module | None) -> bool:
    """Whether `HeadGradient` takes this head."""
    return type(head) is nn.Linear and head.weight.requires_grad and "forward" not in vars(head)


class HeadGradient:
    """Gradient of the head on one micro-batch. Made anew for each, with a head that `has_one_gradient`."""

    def __init__(self, head: nn.Module) -> None:
        assert isinstance(head, nn.Linear)
        self._head = head
        self._sum = _Sum()
        self._token: torch.Tensor | None = None

    def around(self, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """`logits_of` with the head's own product replaced; also for the runs that a checkpoint repeats."""

        def run(hidden: torch.Tensor) -> torch.Tensor:
            with patch.object(self._head, "forward", self._forward):
                return logits_of(hidden)

        return run

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._head.weight, self._head.bias
        if torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight, bias)
        if self._token is None:  # in here, where ZeRO-3 has gathered the weight: autograd notes its shape
            self._token = _Deliver.apply(weight, self._sum)
        return _LinearInto.apply(x, weight, bias, self._token, self._sum)  # pyright: ignore[reportReturnType]


class _Sum:
    """Sum of the weight's gradients so far, in one backward pass."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._pass_id = -1

    def add(self, grad_NV: torch.Tensor, x_NH: torch.Tensor) -> None:
        pass_id = torch._C._current_graph_task_id()
        if self._buffer is None or pass_id != self._pass_id:  # a pass that did not want the weight's may have left one
            self._buffer, self._pass_id = grad_NV.t().matmul(x_NH), pass_id
        else:
            self._buffer.addmm_(grad_NV.t(), x_NH)

    def take(self) -> torch.Tensor | None:
        taken, self._buffer = self._buffer, None
        return taken


class _Deliver(torch.autograd.Function):
    """A scalar for every chunk to depend on: its backward comes after theirs."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, of_chunks: _Sum) -> torch.Tensor:
        ctx.of_chunks = of_chunks
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.of_chunks.take(), None


class _LinearInto(torch.autograd.Function):
    """F.linear whose weight's gradient goes to `of_chunks`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, token: torch.Tensor, of_chunks: _Sum
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.of_chunks = of_chunks
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad.matmul(weight) if needs_x else None
        rows = grad.reshape(-1, grad.shape[-1])
        ctx.of_chunks.add(rows, x.reshape(-1, x.shape[-1]))
        return grad_x, None, rows.sum(0) if needs_bias else None, None, None
