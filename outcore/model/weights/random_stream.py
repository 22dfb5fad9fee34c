"""A stream of random numbers that belongs to one thread, for code that asks torch's default generator.

Initialisers of models call `weight.normal_()` and the like without a generator, so two of them can run at the same
time only if each is given one of its own on the way. `RandomStream(seed)` does that for every draw made in its thread
while it is entered: the numbers are those that the default generator gives after `torch.manual_seed(seed)`, bit by bit.
Draws that take no generator (`torch.rand(n)`) raise `SharedStreamNeeded` before anything is drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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
