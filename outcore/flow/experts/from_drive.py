"""Experts on a drive that the CPU is to multiply: each is read into a slot in RAM when it is needed.

A thread that answers a GPU's questions asks for them (`Scattered`), and waits. Slots that were asked for least recently
make room, as far as that is told: of what a question needs nothing is told where none of it is missing."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from outcore.common.errors import EngineError
from outcore.common.quantities import round_up
from outcore.flow.experts.cache import ExpertCounts
from outcore.flow.experts.form import form_of
from outcore.flow.parts import Part
from outcore.flow.weights import WeightHomes
from outcore.formats import Scattered
from outcore.storage import Transfer, aligned_bytes

PAGE_BYTES = 4096
TIMEOUT_S = 600.0


class DriveExperts:
    """Slots in RAM for the experts of `parts` (by layer) whose homes are not in RAM as a whole. `num_slots`: at least
    what one question may ask for."""

    def __init__(self, parts: Mapping[int, Part], homes: WeightHomes, num_slots: int, counts: ExpertCounts) -> None:
        self._parts, self._homes, self._counts = dict(parts), homes, counts
        size_bytes = round_up(max(form_of(part).size_bytes for part in parts.values()), PAGE_BYTES)
        self.memory = torch.from_numpy(aligned_bytes(num_slots * size_bytes)).view(num_slots, size_bytes)
        """[slots, bytes of one expert]."""
        self.of: dict[int, Scattered] = {}
        """Places of each layer's experts, from the first slot on."""
        self.error: Exception | None = None
        """Why experts could not be read, the first time that it was so."""
        self._slots = OrderedDict[tuple[int, int], int]()
        self._free = list(range(num_slots))
        for layer, part in self._parts.items():
            ram, form = homes.ram(part).view(torch.uint8), form_of(part)
            places = torch.full((form.num_experts,), Scattered.ABSENT, dtype=torch.int64)
            first = ram.data_ptr() - self.memory.data_ptr()
            for expert in range(len(ram) // form.size_bytes):
                places[expert] = first + expert * form.size_bytes
            self.of[layer] = Scattered(places, lambda experts, layer=layer: self._fetch(layer, experts))

    def _fetch(self, layer: int, experts: Sequence[int]) -> int:
        """Bring those that are absent; `experts`: all that the question needs."""
        places = self.of[layer].places
        for key in [(layer, expert) for expert in experts]:
            if key in self._slots:
                self._slots.move_to_end(key)
        try:
            for read in [self._read(layer, n) for n in experts if places[n] == Scattered.ABSENT]:
                read.wait(TIMEOUT_S)
        except Exception as error:  # whoever called is no Python code: `error` has it
            self.error = self.error or error
            return errno.EIO
        return 0

    def _read(self, layer: int, expert: int) -> Transfer:
        part = self._parts[layer]
        slot = self._free.pop() if self._free else self._forget()
        self._slots[layer, expert] = slot
        self.of[layer].places[expert] = slot * self.memory.shape[1]
        out = self.memory[slot, : form_of(part).size_bytes].view(part.layout.dtype)
        ram, start = self._homes.ram(part), expert * len(out)
        in_ram = max(0, min(len(ram) - start, len(out)))
        out[:in_ram] = ram[start : start + in_ram]
        stored = self._homes.stored_at(part, start + in_ram)
        assert stored is not None
        store, name, offset_bytes = stored
        self._counts.for_cpu_bytes += out[in_ram:].nbytes
        return store.submit_read(name, out[in_ram:], offset_bytes)

    def _forget(self) -> int:
        (layer, expert), slot = self._slots.popitem(last=False)
        self.of[layer].places[expert] = Scattered.ABSENT
        return slot

    def check(self) -> None:
        """EngineError when an expert could not be read."""
        if self.error is not None:
            raise EngineError(f"experts could not be read from the drive: {self.error}") from self.error
