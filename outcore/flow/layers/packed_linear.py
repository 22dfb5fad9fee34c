"""Linear layers of packed weights as compiled layers run them on a GPU: one operation on the packed bytes, which the
compiler does not look into, with the layer's other operations joined around it as ever."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outcore.flow.parts import Part, Stand, shell_of
from outcore.formats import PackedSpec, device_products, packed_format


@torch.library.custom_op("outcore::packed_linear", mutates_args=())
def packed_linear(x: torch.Tensor, data: torch.Tensor, name: str, rows: int, columns: int) -> torch.Tensor:
    """x [..., columns] times a weight [rows, columns] of that format, whose bytes `data` are on the device of x."""
    spec = PackedSpec(packed_format(name), (rows, columns))
    found = device_products(x.device).multiply(spec, spec.planes(data), x.reshape(-1, columns))
    return found.view(*x.shape[:-1], rows)


@packed_linear.register_fake
def _(x: torch.Tensor, data: torch.Tensor, name: str, rows: int, columns: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))


class PackedLinear(Stand):
    """Stands for a linear layer that gets packed bytes (uint8, 1-D) in place of its weight; shares its parameters."""

    def __init__(self, original: nn.Linear, spec: PackedSpec) -> None:
        super().__init__(original)
        self._parameters.update(original._parameters)
        self._format, (self._rows, self._columns) = spec.format.name, spec.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = packed_linear(x, self.weight, self._format, self._rows, self._columns)
        return y if self.bias is None else y + self.bias


def with_packed_linears(layer: nn.Module, unit: Part) -> nn.Module | None:
    """The layer with linear layers that take the bytes of their packed weights, sharing everything else; None where
    anything but a plain linear layer holds a packed weight."""
    packed = {id(p): slot.packed for slot, p in zip(unit.layout.slots, unit.parameters, strict=True)}
    held: list[tuple[str, Any, PackedSpec]] = [
        (path, module, spec)
        for path, module in layer.named_modules()
        for parameter in module.parameters(recurse=False)
        if (spec := packed.get(id(parameter))) is not None
    ]
    if any(type(module) is not nn.Linear or spec.is_transposed for _, module, spec in held):
        return None
    if any(hasattr(module, "base_layer") for module in layer.modules()):  # adapters take the weight itself
        return None
    return shell_of(layer, {path: PackedLinear(module, spec) for path, module, spec in held})
