"""Stand-ins: tensors with shape and type but the memory of one element, for parameters that live elsewhere.

Zero strides over a single zero. They run through a model's code (embedding lookups, products) like real weights of
zeros, so a model's structure can be traced with them, and refuse to be written to, so nothing is lost in them silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def stand_in(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros on the CPU that takes no memory."""
    return torch.zeros((), dtype=dtype).expand(shape)


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules made inside have stand-ins for parameters, and real buffers.

    Each parameter exists for the moment of its making, untouched, which costs address space and no memory.
    """
    register = nn.Module.register_parameter

    def register_stand_in(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.numel() > 1:
            value = stand_in(parameter.shape, parameter.dtype)
            replaced = nn.Parameter(value, requires_grad=parameter.requires_grad)
            vars(replaced).update(vars(parameter))  # marks that a model's constructor has set
            parameter = replaced
        register(module, name, parameter)

    nn.Module.register_parameter = register_stand_in  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = register
