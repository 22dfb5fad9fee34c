"""A layer that stays what it is to everybody, but for how it runs: `forward` is a visit of its stack.

The layer's class becomes a subclass of its own, of the same name: parameters, names, hooks and `isinstance` are as they
were, a copy or a pickle is streamed again, and moving the model to a device leaves its layers in RAM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import nn

from outcore.hf.homes import Elsewhere
from outcore.hf.stack import LayerStack
from outcore.hf.visit import LayerVisit

STACK, INDEX = "_outcore_stack", "_outcore_index"


def become_streamed(layer: nn.Module, stack: LayerStack, index: int) -> None:
    """Have a layer run as layer `index` of a stack from now on."""
    layer.__dict__.update({STACK: stack, INDEX: index})
    layer.__class__ = streamed_class(type(layer))


def is_streamed(module: nn.Module) -> bool:
    return STACK in module.__dict__


def room_bytes(model: nn.Module) -> int | None:
    """Device memory that a streamed model's weights and gradients leave to what is computed. None: nobody limits it."""
    return _stack_of(model).room_bytes


def staying(model: Any, kv_bytes: int) -> AbstractContextManager[bool]:
    """Within this context as many layers' weights as fit stay on the device beside keys and values of `kv_bytes`, so
    that passes do not bring them again; gives whether all do. Nobody may train the model meanwhile."""
    return _stack_of(model).staying(kv_bytes, model.config.get_text_config().hidden_size, model.dtype.itemsize)


def _stack_of(model: nn.Module) -> LayerStack:
    return next(module.__dict__[STACK] for module in model.modules() if is_streamed(module))


@cache
def streamed_class(own: type[nn.Module]) -> type[nn.Module]:
    """The class of streamed layers of this class."""

    class Streamed(own):  # type: ignore[misc, valid-type]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return _blank, (own,), self.__dict__

        def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            def here(tensor: torch.Tensor) -> torch.Tensor:
                """Another type, on the device where it is."""
                probe = fn(torch.empty(0, dtype=tensor.dtype))
                if probe.dtype == tensor.dtype:
                    return tensor
                if isinstance(tensor, Elsewhere):
                    raise tensor.refusal(f"change to {probe.dtype}")
                return tensor.to(probe.dtype)

            return super()._apply(here, recurse)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stack, index = self.__dict__[STACK], self.__dict__[INDEX]
        return LayerVisit(stack, index, own.forward, args, kwargs).output()

    # Set from outside: a `forward` in the body of a subclass would get transformers' own checkpointing around it.
    Streamed.forward = torch.compiler.disable(forward)  # type: ignore[method-assign]
    Streamed.__name__, Streamed.__qualname__ = own.__name__, own.__qualname__
    Streamed.__module__, Streamed.__doc__ = own.__module__, own.__doc__
    return Streamed


def _blank(own: type[nn.Module]) -> nn.Module:
    """A streamed layer without anything, for whoever copies or unpickles one."""
    kind = streamed_class(own)
    return kind.__new__(kind)
