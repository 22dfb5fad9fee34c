"""Router logits of a mixture of experts, seen while its layers run: by what the model says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from outcore.flow.parts import ModelParts, StreamUnsupported


class RouterTaps:
    """Hooks at the routers of every layer. StreamUnsupported when the model does not tell which modules they are."""

    def __init__(self, units: ModelParts) -> None:
        self._routers = [_router_modules(units, layer) for layer in units.layers]
        if not any(self._routers):
            raise StreamUnsupported(
                "it has a balancing loss, but does not tell which modules are its routers (without that loss, "
                "output_router_logits false in its config, it may be streamed)"
            )

    @contextmanager
    def seen(self, layer: int, found: list[torch.Tensor]) -> Iterator[None]:
        """Within this context the logits of this layer's routers are appended to `found` as they are computed."""
        hooks = [
            module.register_forward_hook(
                lambda _m, _a, out, i=item: found.append(out if isinstance(out, torch.Tensor) else out[i])
            )
            for module, item in self._routers[layer]
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _router_modules(units: ModelParts, layer: nn.Module) -> list[tuple[nn.Module, int]]:
    """(module, index of the logits in its output) for each router within a layer."""
    found: list[tuple[nn.Module, int]] = []
    for holder in (units.parts.decoder, units.parts.causal):
        recorders = (getattr(holder, "_can_record_outputs", None) or {}).get("router_logits")
        if recorders is None:
            continue
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            target = getattr(recorder, "target_class", recorder)
            name = getattr(recorder, "layer_name", None)
            for path, module in layer.named_modules():
                is_there = not name or f".{name.strip('.')}." in f".{path}."
                if isinstance(target, type) and isinstance(module, target) and is_there:
                    found.append((module, int(getattr(recorder, "index", 0))))
        break
    return found
