"""Sources of weights when a part is to be uploaded, and what arrives: the two sides of flow's weights.

The slab that a layer uses, from what its home holds: the same bytes, or packed ones expanded into one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from outcore.common.deadline import Deadline
from outcore.flow.parts import Part
from outcore.flow.trace import Stalls
from outcore.flow.weights.homes import WeightHomes
from outcore.formats import Again
from outcore.storage import TensorStore


class WeightSource(Protocol):
    """Who knows where a part's weights are, and whether they may be read yet."""

    def ram(self, unit: Part) -> torch.Tensor:
        """The part's parameters in RAM, 1-D; the rest of them, if any, are at `stored`."""
        ...

    def stored(self, unit: Part) -> tuple[TensorStore, str] | None:
        """Place on NVMe where the rest of the part's parameters lives; None when all are in RAM."""
        ...

    def cached(self, unit: Part) -> torch.Tensor | None:
        """The end of that rest, 1-D, where RAM has it, too, until the part's use after this one; None where it has not.
        Asked once the part is current."""
        ...

    def is_current(self, unit: Part) -> bool:
        """Whether the last change to the part has been made."""
        ...

    def wait_current(self, unit: Part) -> None:
        """Block until it has; raises what went wrong with it."""
        ...


class FixedWeights:
    """The source of weights that nobody changes."""

    def __init__(self, homes: WeightHomes) -> None:
        self._homes = homes

    def ram(self, unit: Part) -> torch.Tensor:
        return self._homes.ram(unit)

    def stored(self, unit: Part) -> tuple[TensorStore, str] | None:
        return self._homes.rest(unit)

    def cached(self, unit: Part) -> None:
        return None

    def is_current(self, unit: Part) -> bool:
        return True

    def wait_current(self, unit: Part) -> None:
        return


class WeightArrival(Protocol):
    """Weights on the device just in time. A pass: `begin`, then `acquire` and `release` each use in turn."""

    stalls: Stalls

    @property
    def device_bytes(self) -> int: ...

    def begin(self, sequence: Sequence[Part]) -> None:
        """Plan a pass that uses these parts in this order, and start the first uploads."""
        ...

    def acquire(self, at: int) -> torch.Tensor:
        """The slab of use number `at` on the device; work queued on the current stream from now on may read it."""
        ...

    def release(self, at: int) -> None:
        """Everything that reads use `at` has been queued."""
        ...

    def abort(self, deadline: Deadline | None = None) -> None:
        """After a failure in mid-pass: wait for uploads under way, so that no buffer is written to later."""
        ...


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
