"""A list's layers through torch.compile, as they are trained.

What is compiled is the forward of a class, for any number of tokens at once: which code runs depends on nothing but the
call, so that a resumed run computes what the run before would have. A layer runs eagerly where its compiled code could
do something else: with hooks inside it, or a forward that somebody has replaced, which the compiler looks at only once;
with dropout, which would draw other numbers in the second computation; and where the compiler fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from outcore.flow.layers import compiler_errors, keep_compiled_code

logger = logging.getLogger(__name__)
MAX_VARIANTS = 16
"""Codes of one class' forward: with a gradient or without, with an adapter switched off, kinds of layers. With more of
them layers run eagerly: a number of its own that each layer reads would have each one compiled, for minutes."""


class CompiledForwards:
    """The compiled forwards of a list of layers, until one fails."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.why_not = ""
        """The reason why these layers run eagerly from now on."""
        self._forwards = dict[type, Any]()
        """Forwards of the modules inside, by class, as they were at first."""

    def suits(self, layer: nn.Module) -> bool:
        """Whether this layer may run compiled now."""
        is_wanted = not self.why_not and layer.training and not torch_module._has_any_global_hook()
        return is_wanted and all(self._is_plain(module) for module in layer.modules() if module is not layer)

    def give_up(self, reason: str) -> None:
        """Run these layers eagerly from now on."""
        self.why_not = reason
        logger.warning("%s: its layers run eagerly: %s", self._path, reason)

    def failed(self, error: Exception) -> None:
        """Give up for an error of the compiler; any other is raised again."""
        if not isinstance(error, compiler_errors()):
            raise error
        text = str(error).strip().splitlines()
        self.give_up(f"torch.compile failed ({type(error).__name__}: {text[0][:300] if text else ''})")

    def _is_plain(self, module: nn.Module) -> bool:
        """Whether calling a module is calling the forward that its class had at first, and nothing else."""
        forward = type(module).forward
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        is_own = "forward" not in module.__dict__ and self._forwards.setdefault(type(module), forward) is forward
        return is_own and not any(hooks)


@cache
def compiled_forward(forward: Callable[..., Any]) -> Any:
    """The compiled forward of a class of layers."""
    keep_compiled_code()
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MAX_VARIANTS)
    return torch.compile(forward, fullgraph=True, dynamic=True)
