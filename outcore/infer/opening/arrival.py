"""Weights where they are: parts that stay are at hand, the others come through flow's lanes in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outcore.common.deadline import Deadline
from outcore.flow import Part, WeightArrival
from outcore.flow.trace import Stalls
from outcore.flow.weights import Expansion, WeightHomes


class ResidentWeights:
    """The `WeightArrival` of a model of which some parts stay. `parts`: those; `travelling`: who brings the
    others; None: none travels."""

    def __init__(
        self, parts: Sequence[Part], homes: WeightHomes, travelling: WeightArrival | None, device: torch.device
    ) -> None:
        self._slabs, self._travelling = {part.index: homes.ram(part) for part in parts}, travelling
        self._expansion = Expansion(parts, device)
        self.stalls = travelling.stalls if travelling is not None else Stalls(device)
        self._uses: list[tuple[Part, int]] = []
        """Each use of the pass, with its number among those that travel (-1: it stays)."""

    @property
    def device_bytes(self) -> int:
        held = sum(slab.nbytes for slab in self._slabs.values() if slab.device.type != "cpu")
        return held + self._expansion.device_bytes + (0 if self._travelling is None else self._travelling.device_bytes)

    def begin(self, sequence: Sequence[Part]) -> None:
        moving = [part for part in sequence if part.index not in self._slabs]
        numbers = iter(range(len(moving)))
        self._uses = [(part, -1 if part.index in self._slabs else next(numbers)) for part in sequence]
        if self._travelling is not None and moving:
            self._travelling.begin(moving)

    def acquire(self, at: int) -> torch.Tensor:
        part, number = self._uses[at]
        if number < 0:
            return self._expansion.slab(part, self._slabs[part.index])
        assert self._travelling is not None
        return self._travelling.acquire(number)

    def release(self, at: int) -> None:
        _, number = self._uses[at]
        if number >= 0 and self._travelling is not None:
            self._travelling.release(number)

    def abort(self, deadline: Deadline | None = None) -> None:
        if self._travelling is not None:
            self._travelling.abort(deadline)
