"""The slab that a layer uses, from what its home holds: the same bytes, or packed ones expanded into one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from outcore.flow.parts import Part
from outcore.formats import Again


class Expansion:
    """Slabs of parts on a device, one at a time.

    A packed part is expanded again for each use, on the compute stream, also in recomputation: nothing that autograd
    keeps can be overwritten behind its back, because a backward pass ends before the next part is expanded."""

    def __init__(self, parts: Iterable[Part], device: torch.device) -> None:
        parts = list(parts)
        self._indices = {part.index for part in parts}
        size_bytes = max((part.layout.size_bytes for part in parts if part.layout.packed_slots), default=0)
        self._buffer = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        self._again: dict[tuple[int, int], Sequence[Again]] = {}
        """How a part's bytes at an address are expanded again."""
        self.as_they_are = frozenset[int]()
        """Indices of parts whose bytes are multiplied as they are for the time being, so that nothing is expanded."""

    @property
    def device_bytes(self) -> int:
        return self._buffer.nbytes

    def expands(self, part: Part) -> bool:
        """Whether the part's bytes are expanded for each use."""
        packed = bool(part.layout.packed_slots)
        return packed and part.index in self._indices and part.index not in self.as_they_are

    def slab(self, part: Part, home: torch.Tensor) -> torch.Tensor:
        """The part's slab from the bytes of its home, on the device; good until the next call. Of a packed part that is
        not expanded, and of one that is multiplied as it is, the bytes themselves (uint8)."""
        if not self.expands(part):
            has_bytes = part.layout.packed_slots or part.index in self.as_they_are
            return home.view(torch.uint8 if has_bytes else part.layout.dtype)
        slab = self._buffer[: part.layout.size_bytes].view(part.layout.dtype)
        place = part.index, home.data_ptr()
        self._again[place] = part.layout.expand(home.view(torch.uint8), slab, self._again.get(place, ()))
        return slab
