"""How the parameters of a unit lie in one flat slab: what is uploaded, updated and saved as one piece.

Trainable parameters come first, frozen ones after them, so that a gradient or a chunk of optimizer states covers the
range [0, trainable_numel) and a frozen base (LoRA) costs nothing but its upload. Every parameter starts at a multiple
of 256 elements: whole cache lines, and whole blocks of 8-bit moments, so that states do not depend on the neighbours.
Gaps hold zeros; their gradient is zero, so they stay zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outcore.common.quantities import round_up
from outcore.optim import BLOCK_NUMEL

ALIGN_NUMEL = BLOCK_NUMEL


def several_types(types: Mapping[str, torch.dtype]) -> str:
    """Why parameters of these types (by name) cannot be streamed; '' when they are of one."""
    counts = Counter(types.values())
    if len(counts) < 2:
        return ""
    usual = counts.most_common(1)[0][0]
    others = [name for name, dtype in types.items() if dtype != usual]
    kinds = ", ".join(sorted({str(types[name]).removeprefix("torch.") for name in others}))
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return (
        f"its parameters are of several types, {kinds} among {str(usual).removeprefix('torch.')} ({others[0]}{more}), "
        "and weights, gradients and states are streamed in one; a model that keeps some in float32 has one type with "
        "--precision fp32"
    )


@dataclass(frozen=True)
class Slot:
    """One parameter's place."""

    name: str
    """Its checkpoint name."""
    shape: tuple[int, ...]
    offset: int
    """In elements from the start of the slab."""
    trainable: bool

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def end(self) -> int:
        return self.offset + self.numel


class SlabLayout:
    """The static layout of one unit's slab. ValueError for parameters that do not fit into one slab."""

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        if why := several_types({name: p.dtype for name, p in parameters}):
            raise ValueError(why)
        self.dtype: torch.dtype = parameters[0][1].dtype if parameters else torch.float32
        offset = 0
        slots: list[Slot] = []
        trainable_end = 0
        for wanted in (True, False):
            for name, p in parameters:
                if p.requires_grad == wanted:
                    slots.append(Slot(name, tuple(p.shape), offset, wanted))
                    offset = round_up(offset + p.numel(), ALIGN_NUMEL)
            if wanted:
                trainable_end = offset
        self.slots = tuple(slots)
        self.trainable_numel = trainable_end
        """Elements of the range with gradients and states, gaps included; 0 when the unit is frozen."""
        self.numel = offset
        """Elements of the slab, gaps included."""

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def trainable_slots(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.trainable)

    @property
    def num_params(self) -> int:
        """Parameters without gaps."""
        return sum(slot.numel for slot in self.slots)

    def gaps(self) -> list[tuple[int, int]]:
        """[start, end) ranges of the trainable part that belong to no parameter."""
        found: list[tuple[int, int]] = []
        at = 0
        for slot in self.trainable_slots:
            if slot.offset > at:
                found.append((at, slot.offset))
            at = slot.end
        if at < self.trainable_numel:
            found.append((at, self.trainable_numel))
        return found

    def views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """All parameters as views of a 1-D slab of at least `numel` elements, in slot order."""
        return [slab[slot.offset : slot.end].view(slot.shape) for slot in self.slots]

    def grad_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The trainable parameters as views of a 1-D tensor of at least `trainable_numel` elements."""
        return [flat[slot.offset : slot.end].view(slot.shape) for slot in self.trainable_slots]
