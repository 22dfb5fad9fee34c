"""Layout of a unit's parameters in one flat slab, which is uploaded, updated and saved as one piece.

Trainable parameters come first, frozen ones after them, so that a gradient or a chunk of optimizer states covers the
range [0, trainable_numel) and a frozen base (LoRA) costs nothing but its upload. Every parameter starts at a multiple
of 256 elements: whole cache lines, and whole blocks of 8-bit moments, so that states do not depend on the neighbours.
Gaps hold zeros; their gradient is zero, so they stay zero.

At home (RAM, NVMe) and on the way a slab may be smaller: frozen parameters that are packed come last, as their packed
bytes, and are expanded on the device into the slab that layers use. Up to them both are the same, element by element;
where nothing is packed the home is the slab."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outcore.common.quantities import round_up
from outcore.formats import Again, PackedSpec
from outcore.optim import BLOCK_NUMEL


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
    """Name in checkpoints."""
    shape: tuple[int, ...]
    offset: int
    """Elements from the start of the slab."""
    trainable: bool
    home_offset: int
    """Elements from the start of the slab's home."""
    packed: PackedSpec | None = None
    """Packed format at home; None: not packed."""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def home_numel(self, itemsize: int) -> int:
        """Elements of `itemsize` bytes at home. Packed bytes are whole elements."""
        return self.numel if self.packed is None else self.packed.size_bytes // itemsize

    @property
    def end(self) -> int:
        return self.offset + self.numel


class SlabLayout:
    """The static layout of one unit's slab. `packed`: frozen parameters that are packed at home, by name.

    ValueError for parameters that do not fit into one slab."""

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], packed: Mapping[str, PackedSpec] | None = None
    ) -> None:
        if why := several_types({name: p.dtype for name, p in parameters}):
            raise ValueError(why)
        self.dtype: torch.dtype = parameters[0][1].dtype if parameters else torch.float32
        packed = packed or {}
        groups = [
            [(name, p) for name, p in parameters if p.requires_grad],
            [(name, p) for name, p in parameters if not p.requires_grad and name not in packed],
            [(name, p) for name, p in parameters if not p.requires_grad and name in packed],
        ]
        ends, offset, home = [], 0, 0
        slots: list[Slot] = []
        for group in groups:
            for name, p in group:
                spec = packed.get(name) if not p.requires_grad else None
                assert spec is None or spec.value_shape == tuple(p.shape), name
                slots.append(Slot(name, tuple(p.shape), offset, p.requires_grad, home, spec))
                offset = round_up(offset + p.numel(), BLOCK_NUMEL)
                at_home = p.numel() if spec is None else spec.size_bytes // self.dtype.itemsize
                home = round_up(home + at_home, BLOCK_NUMEL)
            ends.append(offset)
        self.slots = tuple(slots)
        self.trainable_numel = ends[0]
        """Elements of the range with gradients and states, gaps included; 0 when the unit is frozen."""
        self.plain_numel = ends[1]
        """Elements up to the first packed parameter: the same at home and on the device."""
        self.numel = offset
        """Elements of the slab, gaps included."""
        self.home_numel = home
        """Elements of the slab's home, gaps included: fewer where parameters are packed."""

    def runs(self, slot: Slot) -> list[tuple[int, int, int]]:
        """A parameter's runs in the home: (start, end, first element of the parameter in the run)."""
        return [(slot.home_offset, slot.home_offset + slot.home_numel(self.dtype.itemsize), 0)]

    @property
    def size_bytes(self) -> int:
        """Bytes on the device."""
        return self.numel * self.dtype.itemsize

    @property
    def home_bytes(self) -> int:
        """Bytes in RAM or on NVMe, and on the way to the device."""
        return self.home_numel * self.dtype.itemsize

    @property
    def packed_slots(self) -> tuple[Slot, ...]:
        """Parameters that are packed at home."""
        return tuple(slot for slot in self.slots if slot.packed is not None)

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
        """Parameters as views of a 1-D slab of at least `numel` elements, in slot order."""
        return [slab[slot.offset : slot.end].view(slot.shape) for slot in self.slots]

    def home_views(self, home: torch.Tensor) -> list[torch.Tensor]:
        """All parameters in slot order from the bytes of a home: views, and of packed ones their bytes (uint8)."""
        size, plain, data = self.dtype.itemsize, home.view(self.dtype), home.view(torch.uint8)
        return [
            plain[slot.home_offset : slot.home_offset + slot.numel].view(slot.shape)
            if slot.packed is None
            else data[slot.home_offset * size : slot.home_offset * size + slot.packed.size_bytes]
            for slot in self.slots
        ]

    def expand(self, home: torch.Tensor, slab: torch.Tensor, again: Sequence[Again] = ()) -> Sequence[Again]:
        """Fill `slab` (at least `numel` elements) from the bytes of its home, uint8 and on the same device.

        On a GPU the work is queued on the current stream. What it gives, if anything, is for the next time with the
        same two addresses."""
        slab[: self.plain_numel].copy_(home.view(self.dtype)[: self.plain_numel])
        for one in again:
            one()
        return again or self._expand_packed(home, slab)

    def _expand_packed(self, home: torch.Tensor, slab: torch.Tensor) -> Sequence[Again]:
        found = list[Again | None]()
        for slot in self.packed_slots:
            assert slot.packed is not None
            start = slot.home_offset * self.dtype.itemsize
            data = home[start : start + slot.packed.size_bytes]
            found.append(slot.packed.expand(data, slab[slot.offset : slot.end].view(slot.shape)))
        again = [one for one in found if one is not None]
        return again if len(again) == len(found) else ()

    def grad_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The trainable parameters as views of a 1-D tensor of at least `trainable_numel` elements."""
        return [flat[slot.offset : slot.end].view(slot.shape) for slot in self.trainable_slots]
