"""How the parameters of a unit lie in one flat slab: what is uploaded, updated and saved as one piece.

Trainable parameters come first, frozen ones after them, so that a gradient or a chunk of optimizer states covers the
range [0, trainable_numel) and a frozen base (LoRA) costs nothing but its upload. Every parameter starts at a multiple
of 256 elements: whole cache lines, and whole blocks of 8-bit moments, so that states do not depend on the neighbours.
Gaps hold zeros; their gradient is zero, so they stay zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outcore.optim import BLOCK_NUMEL
from outcore.units import round_up

ALIGN_NUMEL = BLOCK_NUMEL


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
        dtypes = {p.dtype for _, p in parameters}
        if len(dtypes) > 1:
            found = ", ".join(sorted(str(d) for d in dtypes))
            raise ValueError(f"its parameters have several types ({found}); a slab holds one")
        self.dtype: torch.dtype = dtypes.pop() if dtypes else torch.float32
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
