"""Which layers are alike, so that one compiled function serves them all.

Two layers are alike when every submodule has the same class and the same plain attributes, functions, configuration
objects and parameters (names, shapes, types, trainable or not). An attribute named after the layer's number may differ
when it *is* the layer's own number: it tells a cache where to store, and nothing is cached in training. So may a text
that ends with the layer's number and the submodule's path within the layer: peft's adapters keep their names. Layers
with buffers are alike to none. Whether sharing changes any number is tried on a tiny copy (`check.sharing_holds`)."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn


def alike(layers: Sequence[nn.Module]) -> list[int]:
    """For each layer the index of the first one that is like it (perhaps itself)."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(structure_of(layer, index), index) for index, layer in enumerate(layers)]


def structure_of(layer: nn.Module, index: int) -> Hashable:
    """A key that is equal for layers that are alike."""
    if next(layer.buffers(), None) is not None:
        return ("has buffers", index)
    return tuple(
        (
            path,
            type(module),
            tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters(recurse=False)),
            tuple(
                sorted(
                    (name, repr(_plain(name, value, index, path)))
                    for name, value in vars(module).items()
                    if not name.startswith("_")
                )
            ),
        )
        for path, module in layer.named_modules()
    )


def _plain(name: str, value: Any, index: int, path: str) -> Hashable:
    if isinstance(value, int) and not isinstance(value, bool) and value == index and ("idx" in name or "layer" in name):
        return "own number"
    own_path = f".{index}.{path}"
    if isinstance(value, str) and path and value.endswith(own_path):
        return ("own path", value.removesuffix(own_path))
    if isinstance(value, (torch.device, torch.dtype)):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return (type(value).__name__, value)
    if isinstance(value, (tuple, list)):
        return tuple(_plain(name, item, index, path) for item in value)
    if isinstance(value, dict):
        return tuple((str(key), _plain(name, item, index, path)) for key, item in value.items())
    if isinstance(value, functools.partial):
        return tuple(_plain(name, part, index, path) for part in (value.func, value.args, value.keywords))
    if hasattr(value, "__qualname__"):
        return (getattr(value, "__module__", ""), value.__qualname__)
    return (type(value).__name__, id(value))
