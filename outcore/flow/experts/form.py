"""A mixture's experts as parts of their own: what routes a token stays with its layer, experts come as they are chosen.

Experts are found by structure: modules whose forward transformers dispatches (`use_experts_implementation`), and that
own nothing but arrays with a row for each expert. Layers of which that is not so, or whose experts carry adapters, stay
whole. At home, too, one expert's arrays lie together, as on the device, so bringing one is one copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from outcore.common.quantities import round_up
from outcore.flow.parts import ModelParts, Part, SlabLayout, Slot

ALIGN_BYTES = 256
"""Each array of an expert starts at a multiple of this on the device, as products of whole stacks want."""


@dataclass(frozen=True)
class ExpertPiece:
    """One array of every expert: a matrix, a bias, or a plane of a packed matrix."""

    slot: int
    """Index among the part's parameters."""
    start: int
    """Element of the parameter (its packed bytes, as elements) with which that of expert 0 begins; others follow."""
    numel: int
    """Elements of each."""
    at_bytes: int
    """Place among the bytes of one expert."""


@dataclass(frozen=True)
class ExpertForm:
    """Layout of one expert of a part, on the device and at home."""

    num_experts: int
    pieces: tuple[ExpertPiece, ...]
    size_bytes: int
    """Bytes of one expert, gaps included."""
    expanded_bytes: int
    """Bytes of one expert's packed matrices after they are expanded."""


def experts_apart(units: ModelParts) -> ModelParts:
    """Take the experts of each layer for a part of their own (`expert_units`, by layer) where that can be."""
    layer_units, expert_units = list(units.layer_units), dict[int, Part]()
    for index, unit in enumerate(units.layer_units):
        module = experts_of(units.layers[index])
        if module is None:
            continue
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        place = len(units.all) + len(expert_units)
        experts = _some_of(unit, place, f"{unit.name} experts", lambda p, own=own: id(p) in own)
        if (stacked := stack(experts)) is not None:
            expert_units[index] = stacked
            layer_units[index] = _some_of(unit, unit.index, unit.name, lambda p, own=own: id(p) not in own)
    return replace(units, layer_units=layer_units, expert_units=expert_units)


def experts_of(layer: nn.Module) -> nn.Module | None:
    """The module that holds the layer's experts as stacks; None: there is none, or it cannot be taken alone."""
    found = [module for module in layer.modules() if hasattr(module, "is_concatenated")]
    adapted = {id(module.base_layer) for module in layer.modules() if hasattr(module, "base_layer")}
    if len(found) != 1 or id(found[0]) in adapted or getattr(found[0], "_is_expert_parallel", False):
        return None
    own = list(found[0].parameters(recurse=False))
    count = getattr(found[0], "num_experts", None)
    return found[0] if own and all(p.ndim > 1 and p.shape[0] == count for p in own) else None


class ExpertsLayout(SlabLayout):
    """The layout of a part of experts, which lie one behind the other at home, each as `form` says."""

    def __init__(self, part: Part, form: ExpertForm) -> None:
        slots = list(zip(part.layout.slots, part.parameters, strict=True))
        packed = {slot.name: slot.packed for slot, _ in slots if slot.packed is not None}
        super().__init__([(slot.name, parameter) for slot, parameter in slots], packed)
        self.form = form
        self.expert_numel = form.size_bytes // self.dtype.itemsize
        """Elements of one expert at home, gaps included."""
        self.home_numel = form.num_experts * self.expert_numel

    def runs(self, slot: Slot) -> list[tuple[int, int, int]]:
        pieces = [piece for piece in self.form.pieces if self.slots[piece.slot] is slot]
        found: list[tuple[int, int, int]] = []
        for piece in pieces:
            for expert in range(self.form.num_experts):
                start = expert * self.expert_numel + piece.at_bytes // self.dtype.itemsize
                found.append((start, start + piece.numel, piece.start + expert * piece.numel))
        return found


def stack(part: Part) -> Part | None:
    """The part with its experts one behind the other; None where their bytes are no whole elements of the home."""
    itemsize, count = part.layout.dtype.itemsize, part.layout.slots[0].shape[0]
    pieces: list[ExpertPiece] = []
    at_bytes = expanded = 0
    for number, slot in enumerate(part.layout.slots):
        for start_bytes, size_bytes in _ranges(slot, itemsize):
            if size_bytes % (count * itemsize) or start_bytes % itemsize:
                return None
            numel = size_bytes // count // itemsize
            pieces.append(ExpertPiece(number, start_bytes // itemsize, numel, at_bytes))
            at_bytes += round_up(numel * itemsize, ALIGN_BYTES)
        if slot.packed is not None:
            expanded += slot.numel // count * itemsize
    return replace(part, layout=ExpertsLayout(part, ExpertForm(count, tuple(pieces), at_bytes, expanded)))


def form_of(part: Part) -> ExpertForm:
    """Layout of the experts of a part."""
    assert isinstance(part.layout, ExpertsLayout), f"the experts of {part.name} were not set apart"
    return part.layout.form


def planes_of(part: Part, memory: torch.Tensor) -> list[list[torch.Tensor]]:
    """For each parameter its arrays in memory [experts or slots, bytes of one expert]: [experts, ...] as one expert's
    are, or [experts, blocks, per_block] of a packed one."""
    found: list[list[torch.Tensor]] = [[] for _ in part.layout.slots]
    for piece in form_of(part).pieces:
        slot, planes = part.layout.slots[piece.slot], found[piece.slot]
        size_bytes = piece.numel * part.layout.dtype.itemsize
        dtype, shape = part.layout.dtype, slot.shape[1:]
        if slot.packed is not None:
            plane = slot.packed.format.planes[len(planes)]
            dtype, shape = plane.dtype, (-1, plane.per_block)
        of_all = memory[:, piece.at_bytes : piece.at_bytes + size_bytes].view(dtype)
        planes.append(of_all.unflatten(1, shape))
    return found


def _ranges(slot: Slot, itemsize: int) -> list[tuple[int, int]]:
    """(first byte, bytes) of each array of a parameter."""
    return [(0, slot.numel * itemsize)] if slot.packed is None else slot.packed.plane_ranges()


def _some_of(unit: Part, index: int, name: str, wanted: Callable[[nn.Parameter], bool]) -> Part:
    """Part of those parameters of a unit."""
    taken = [(slot, p, owners) for slot, p, owners in zip(unit.layout.slots, unit.parameters, unit.owners, strict=True)]
    taken = [of_slot for of_slot in taken if wanted(of_slot[1])]
    packed = {slot.name: slot.packed for slot, _, _ in taken if slot.packed is not None}
    layout = SlabLayout([(slot.name, p) for slot, p, _ in taken], packed)
    by_name = {slot.name: (p, owners) for slot, p, owners in taken}
    ordered = [by_name[slot.name] for slot in layout.slots]
    return Part(index, name, layout, [owners for _, owners in ordered], [p for p, _ in ordered])
