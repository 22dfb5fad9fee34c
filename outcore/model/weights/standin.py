"""Stand-ins: tensors with shape and type but the memory of one element, for parameters that live elsewhere.

Zero strides over a single zero. They run through a model's code (embedding lookups, products) like real weights of
zeros, so a model's structure can be traced with them, and refuse to be written to, so nothing is lost in them silently.

A stream of random numbers that belongs to one thread, for code that asks torch's default generator.

Initialisers of models call `weight.normal_()` and the like without a generator, so two of them can run at the same
time only if each is given one of its own on the way. `RandomStream(seed)` does that for every draw made in its thread
while it is entered: the numbers are those that the default generator gives after `torch.manual_seed(seed)`, bit by bit.
Draws that take no generator (`torch.rand(n)`) raise `SharedStreamNeeded` before anything is drawn.

Whether a folder of weights is what was written: no shard outside it, and checksums where an export left them.

outcore's exports carry `outcore-checksums.json`; reading every byte once against it costs a second for some GB. A
configuration or a chat template may have been edited since: that is said, damaged weights are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.common import file_errors, inside
from outcore.common.listing import DamagedListing, damaged_weights


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


class SharedStreamNeeded(RuntimeError):
    """The code draws in a way that only the default generator serves; run it alone, with that one seeded."""


class RandomStream(TorchDispatchMode):
    """Random numbers in torch's order. A context manager; other threads are not touched."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("generator") is None:
            target = args[0] if args else None
            takes_one = any(argument.name == "generator" for argument in func._schema.arguments)
            if not isinstance(target, torch.Tensor) or (target.is_cpu and not takes_one):
                raise SharedStreamNeeded(f"{func} takes no generator")
            if target.is_cpu:
                given["generator"] = self._generator
        return func(*args, **given)


INDEX = "model.safetensors.index.json"


def check_weight_files(path: str | None) -> tuple[str, ...]:
    """Notes for people. RuntimeError for damaged weights, ValueError for an index that leads out of the folder."""
    if path is None or not Path(path).is_dir():
        return ()
    folder = Path(path)
    _check_index(folder)
    try:
        with file_errors("verifying the weights", folder):
            damaged, changed = damaged_weights(folder)
    except DamagedListing as error:
        raise RuntimeError(f"{error} Remove it if you trust the weights, or export the model again.") from error
    if damaged:
        raise RuntimeError(
            f"The weights are damaged or cut short: {damaged[0]} Copy or download them again, or export the model "
            "again from its checkpoint."
        )
    return tuple(f"changed since the export: {words}" for words in changed)


def _check_index(folder: Path) -> None:
    index = folder / INDEX
    if not index.is_file():
        return
    try:
        with file_errors("reading the index of the weights", index):
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for name in names:
            inside(folder, name, follow_links=True)  # the hub's own cache is made of links
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: its weight_map cannot be used: {error}.") from error
