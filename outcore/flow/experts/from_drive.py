"""Experts on a drive that the CPU is to multiply: each is read into a slot in RAM when it is needed.

The thread that answers a GPU's questions asks for missing experts (`Scattered`) and waits for them. The least recently
used slot makes room. Uses are seen only in questions with a missing expert, because the thread hears of no others. A
failed read ends the pass without results, and the next pass reads again."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from outcore.common.deadline import TIMEOUT_S
from outcore.common.errors import EngineError
from outcore.common.quantities import round_up
from outcore.flow.experts.cache import ExpertCounts
from outcore.flow.experts.form import form_of
from outcore.flow.parts import Part
from outcore.flow.weights import WeightHomes
from outcore.formats import Scattered
from outcore.storage import Transfer, aligned_bytes

PAGE_BYTES = 4096


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
        self._error: Exception | None = None
        """Why experts of this pass could not be read, the first of them."""
        self._unread: set[tuple[int, int]] = set()
        """Experts whose last read failed, by layer and number."""
        self._is_lost = False
        """Whether the error is there to stay."""
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
        if self._error is not None:  # the pass is lost already
            return errno.EIO
        reads: dict[tuple[int, int], Transfer] = {}
        for key in [(layer, n) for n in experts if places[n] == Scattered.ABSENT]:
            try:
                reads[key] = self._read(*key)
            except Exception as error:  # whoever called is no Python code: `check` raises it
                self._lose(key, error)
        for key, read in reads.items():  # all of them: nothing may still arrive in a slot that is free again
            try:
                read.wait(TIMEOUT_S)
                self._unread.discard(key)
            except Exception as error:
                self._is_lost |= not read.done()
                self._lose(key, error)
        return 0 if self._error is None else errno.EIO

    def _lose(self, key: tuple[int, int], error: Exception) -> None:
        self._error = self._error or error
        self._is_lost |= key in self._unread
        self._unread.add(key)
        layer, expert = key
        self.of[layer].places[expert] = Scattered.ABSENT
        self._free.append(self._slots.pop(key))

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
        """EngineError when an expert of the pass that has run could not be read; always, once one has failed twice in a
        row."""
        error = self._error
        if error is not None:
            self._error = error if self._is_lost else None
            then = (
                "It failed again: look at the drive and start again" if self._is_lost else "The next pass tries again"
            )
            raise EngineError(f"experts could not be read from the drive: {error}. {then}.") from error
