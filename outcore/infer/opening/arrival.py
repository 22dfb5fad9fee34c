"""Weights where they are: parts that stay are at hand, the others come through flow's lanes in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from outcore.common.deadline import Deadline
from outcore.flow import Part, WeightArrival
from outcore.flow.experts import ExpertCache
from outcore.flow.trace import Stalls
from outcore.flow.weights import Expansion, InPlaceProducts, WeightHomes
from outcore.staging.pool import device_view


class ResidentWeights:
    """The `WeightArrival` of a model of which some parts stay. `parts`: those; `travelling`: who brings the
    others; None: none travels. `in_place`: computes with parts where they are, those that stay on a CPU, and of
    `on_cpu` (whole in RAM, they travel otherwise) those that `names` tells for a number of tokens; on a GPU also packed
    ones that arrive there, in passes of few tokens. `expansion`: the one that `travelling` uses."""

    def __init__(
        self,
        parts: Sequence[Part],
        homes: WeightHomes,
        travelling: WeightArrival | None,
        device: torch.device,
        in_place: InPlaceProducts | None = None,
        on_cpu: Sequence[Part] = (),
        names: Callable[[int], Sequence[str]] = lambda tokens: (),
        expansion: Expansion | None = None,
    ) -> None:
        self._slabs, self._travelling = {part.index: homes.ram(part) for part in parts}, travelling
        self._expansion = Expansion(parts, device) if expansion is None else expansion
        self._names = names
        self._in_place, self._now = in_place, frozenset[str]()
        self._as_they_are = frozenset[int]()
        """Parts that the device can multiply as they are."""
        self._homes = {part.index: homes.ram(part).view(torch.uint8) for part in on_cpu}
        self.stalls = travelling.stalls if travelling is not None else Stalls(device)
        self.experts: ExpertCache | None = None
        """Brings experts as they are chosen; None: they come with their layers."""
        self._read_there: set[int] = set()
        self._beside: Any = torch.cuda.Stream(device) if on_cpu and device.type == "cuda" else None
        self._expanded = dict[int, torch.Tensor]()
        """Slabs that were expanded ahead, by use."""
        self._uses: list[tuple[Part, int]] = []
        """Each use of the pass, with its number among those that travel (-1: it stays)."""
        self._ahead: list[Part] | None = None
        """Parts that the next pass is expected to bring: those of the last one. Their first uploads begin as soon as
        buffers are free, so that the link is busy while tokens are chosen."""

    def multiply_there(self, parts: Iterable[Part]) -> None:
        """Have the device multiply those of these parts as they are that it can, in passes of few tokens."""
        if self._in_place is not None:
            self._as_they_are = frozenset(part.index for part in parts if self._in_place.is_there(part))

    def read_there(self, part: Part, home: torch.Tensor, device: torch.device) -> None:
        """Have the device read rows of a part that stays in page-locked RAM, where they are."""
        self._slabs[part.index] = device_view(home.view(torch.uint8), device)
        self._read_there.add(part.index)

    @property
    def device_bytes(self) -> int:
        there = self._read_there
        held = sum(s.nbytes for at, s in self._slabs.items() if s.device.type != "cpu" and at not in there)
        of_experts = 0 if self.experts is None else self.experts.memory.nbytes
        return held + of_experts + (self._expansion if self._travelling is None else self._travelling).device_bytes

    def waited_s(self) -> dict[str, float]:
        """Seconds that the device waited in the pass that has run: for copies ("pcie") and for the drive ("nvme")."""
        return {
            name: seconds
            for told, seconds in self.stalls.seconds(before=True).items()
            if (name := told.removeprefix("stall_")) != "optimizer"
        }

    def compute(self, names: Callable[[int], Sequence[str]]) -> None:
        """Have the CPU compute those of `on_cpu` that `names` tells for a number of tokens, from the next pass on."""
        self._names = names

    def expect(self, tokens: int | None) -> None:
        """The next pass has so many tokens; None: its results may not depend on their number."""
        self._now = frozenset(() if tokens is None else self._names(tokens))
        if self._in_place is not None:
            self._in_place.is_exact = tokens is None
            is_small = tokens is not None and tokens <= self._in_place.device_tokens
            self._expansion.as_they_are = self._as_they_are if is_small else frozenset()

    def is_on_cpu(self, part: Part) -> bool:
        """Whether the CPU computes a part of the next pass for the GPU."""
        return part.name in self._now and part.index in self._homes

    def begin(self, sequence: Sequence[Part]) -> None:
        moving = [part for part in sequence if part.index not in self._slabs and not self.is_on_cpu(part)]
        self._expanded = {}
        travels, numbers = {part.index for part in moving}, iter(range(len(moving)))
        self._uses = [(part, next(numbers) if part.index in travels else -1) for part in sequence]
        ahead, self._ahead = self._ahead, None
        if self._travelling is None or not moving:
            return
        if ahead is not None and [part.index for part in ahead] != [part.index for part in moving]:
            self._travelling.abort()
            ahead = None
        if ahead is None:
            self._travelling.begin(moving)

    def acquire(self, at: int, *, expands: bool = True) -> torch.Tensor:
        """Slab of a use. `expands`: of a packed part that stays; else its bytes, for `expanded`."""
        part, number = self._uses[at]
        if not expands:
            return self._slabs[part.index]
        if number < 0 and part.index not in self._slabs:
            self._expand_ahead(at + 1)
            return self._homes[part.index]
        if at in self._expanded:
            with self.stalls.until(f"weights of {part.name}", "pcie"):
                torch.cuda.current_stream().wait_stream(self._beside)
            return self._expanded.pop(at)
        return self._slab(at)

    def _expand_ahead(self, at: int) -> None:
        """Have the next part expanded while the CPU computes the one before, for which the device waits."""
        part, number = self._uses[at] if at < len(self._uses) else (None, -1)
        if part is None or not self._expansion.expands(part) or (number < 0 and part.index not in self._slabs):
            return
        self._beside.wait_stream(torch.cuda.current_stream())  # who used the buffer before
        with torch.cuda.stream(self._beside):
            self._expanded[at] = self._slab(at)
        if number >= 0:
            self.stalls.withdraw()  # nobody has waited yet

    def _slab(self, at: int) -> torch.Tensor:
        part, number = self._uses[at]
        if number < 0:
            return self._expansion.slab(part, self._slabs[part.index])
        assert self._travelling is not None
        return self._travelling.acquire(number)

    def release(self, at: int) -> None:
        _, number = self._uses[at]
        if number >= 0 and self._travelling is not None:
            self._travelling.release(number)
        if at == len(self._uses) - 1:
            moving = [part for part, number in self._uses if number >= 0]
            if moving and self._travelling is not None:
                self._travelling.begin(moving)
                self._ahead = moving
            elif self.experts is not None:
                self.stalls.begin()

    def stays(self, part: Part) -> bool:
        """Whether the part's bytes have one address for good, also while other parts are used, and become its slab when
        it runs. Where the CPU computes layers, packed ones are expanded beside it."""
        is_beside = self._homes and self._expansion.expands(part)
        return part.index in self._slabs and not is_beside

    def expanded(self, part: Part, given: torch.Tensor) -> torch.Tensor:
        """Slab of a part that stays, from its bytes; good until another is expanded."""
        return self._expansion.slab(part, given)

    def abort(self, deadline: Deadline | None = None) -> None:
        self._ahead = None
        if self._travelling is not None:
            self._travelling.abort(deadline)
        if self.experts is not None:
            self.experts.abort(deadline)
