"""Stand-ins: tensors with shape and type but the memory of one element, for parameters that live elsewhere.

Zero strides over a single zero. They run through a model's code (embedding lookups, products) like real weights of
zeros, so a model's structure can be traced with them, and refuse to be written to, so nothing is lost in them silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def stand_in(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros on the CPU that takes no memory."""
    return torch.zeros((), dtype=dtype).expand(shape)


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether the tensor has shape only. Never of one element, which any tensor has memory for."""
    return tensor.numel() > 1 and not any(tensor.stride())


def without_memory(build: Callable[[], Any]) -> Any:
    """`build()`'s module with stand-ins for parameters and with real buffers.

    While it is built, each parameter is real only for the moment of its making, untouched, which costs address space
    and no memory; then it is on the meta device, where a constructor may write to it without effect."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = _like(parameter, parameter.detach().to("meta"))

    nn.Module.register_parameter = register_on_meta  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model = build()
    finally:
        nn.Module.register_parameter = register
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = _like(parameter, stand_in(parameter.shape, parameter.dtype))
                module._parameters[name] = made[id(parameter)]
    return model


def _like(parameter: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """With the marks that a constructor has set on the parameter."""
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(new).update(vars(parameter))
    return new
