"""Do layers hand each other more than the hidden states? Seen in a run of a tiny copy's whole decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from outcore.flow.parts import ModelParts
from outcore.model.forward import Batch, forward_inputs


@torch.no_grad()
def why_not_by_hidden_states(units: ModelParts, batch: Batch) -> str:
    """Reason why hidden states alone do not suffice, '' when they do: a layer uses another tensor that an earlier one
    returned (such as chosen tokens). Layers called with such a tensor are run again without it."""
    returned: dict[int, tuple[int, torch.Tensor]] = {}
    found: list[str] = []
    hooks = []
    for index, layer in enumerate(units.layers):

        def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any, index: int = index) -> None:
            given = {**dict(enumerate(args)), **kwargs}
            names = [name for name, value in given.items() if any(id(t) in returned for t in tree_leaves(value))]
            if names:
                without = {name: None if name in names else value for name, value in given.items()}
                places = [without.pop(place) for place in range(len(args))]
                if _differs(lambda: module.forward(*places, **without), output):
                    giver, _ = next(returned[id(t)] for t in tree_leaves(given[names[0]]) if id(t) in returned)
                    found.append(f"layer {index} uses what layer {giver} returned beside them ({names[0]})")
            if not isinstance(output, torch.Tensor):
                returned.update(
                    {id(t): (index, t) for t in tree_leaves(list(output[1:])) if isinstance(t, torch.Tensor)}
                )

        hooks.append(layer.register_forward_hook(after, with_kwargs=True))
    try:
        decoder = units.parts.decoder
        decoder(**forward_inputs(decoder, batch, units.isolation))
    finally:
        for hook in hooks:
            hook.remove()
    return f"its layers hand each other more than the hidden states: {found[0]}" if found else ""


def _differs(again: Callable[[], Any], output: Any) -> bool:
    """Whether a layer run again gives other hidden states than these, or fails."""
    try:
        pair = [value if isinstance(value, torch.Tensor) else value[0] for value in (again(), output)]
    except Exception:  # any model's own code may fail in any way without an argument
        return True
    return not torch.equal(*pair)
