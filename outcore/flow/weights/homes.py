"""Homes of the parameters: the first part of each unit's slab in RAM, the rest in scratch on NVMe.

A RAM budget is spread evenly: every layer keeps the same share in RAM. The drive then reads a little for each layer, so
it is busy through the whole pass, and each read hides behind the neighbours' compute. With the last layers wholly on
NVMe the drive would first be idle, with its slots full, and then be what everything waits for. Embedding and head get
RAM first, because they have one device buffer and no neighbour to hide behind. A unit that is mostly frozen (LoRA)
keeps its trained parameters in RAM. Elsewhere the cut lies between two chunks of optimizer states, so that a chunk's
parameters are in one place. The ring of states writes back those on NVMe.

Frozen parameters may be packed (`SlabLayout`): each is packed as its value comes, and expanded when it is asked for.
A module's parameter is a view of its home where that is RAM and not packed, else a stand-in of the right shape without
memory: who needs values asks here, by name. Offsets and lengths are elements of the home.

Sources of weights when a part is to be uploaded, and what arrives: the two sides of flow's weights.

The slab that a layer uses, from what its home holds: the same bytes, or packed ones expanded into one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from outcore.common.deadline import TIMEOUT_S, Deadline
from outcore.common.errors import EngineError
from outcore.flow.parts import Part, Slot
from outcore.flow.trace import Stalls
from outcore.flow.weights.scratch import Scratch
from outcore.formats import Again, PackedTensor
from outcore.model.adapters import row_lengths
from outcore.model.weights import WeightFeed, stand_in
from outcore.staging.pool import HomeMemory
from outcore.storage import StorageError, TensorSpec, TensorStore, Transfer

KIND = "weights"


class WeightHomes:
    """Homes of all parameters of a model. `cuts`: elements of each part, by its index, that live in RAM; `scratch` may
    be None where that is all; `feed`: values of parameters that the model does not hold itself (loaded lazily);
    `lengths`: parameters that start as the norms of another's rows, as `dora_lengths` tells them. `owned`: indices of
    units whose values this process writes (None: all), because the memory of the others is shared with a process that
    does. `kind`: name of the store on NVMe.

    EngineError when the drives have no room."""

    def __init__(
        self,
        units: Sequence[Part],
        memory: HomeMemory,
        cuts: dict[int, int],
        scratch: Scratch | None,
        feed: WeightFeed | None = None,
        *,
        lengths: Mapping[str, tuple[str, bool]] = MappingProxyType({}),
        owned: frozenset[int] | None = None,
        kind: str = KIND,
    ) -> None:
        self._units = list(units)
        self._cuts = cuts
        self._slots: dict[str, tuple[Part, Slot]] = {
            slot.name: (unit, slot) for unit in units for slot in unit.layout.slots
        }
        spilled = [unit for unit in units if cuts[unit.index] < unit.layout.home_numel]
        self.store: TensorStore | None = None
        if spilled:
            assert scratch is not None, "nvme_path is checked with the settings"
            self.store = scratch.store(kind, [_spec(unit, cuts[unit.index]) for unit in spilled])
        self._memory, self._feed, self._lengths, self._owned = memory, feed, lengths, owned
        self._ram: dict[int, torch.Tensor] = {}
        self._gathered: dict[int, tuple[torch.Tensor, set[str]]] = {}
        """Homes of units whose parameters lie interleaved, until all have come, with the names of those missing."""

    @property
    def ram_bytes(self) -> int:
        return sum(part.nbytes for part in self._ram.values())

    @property
    def nvme_bytes(self) -> int:
        return sum(unit.layout.home_bytes for unit in self._units) - self.ram_bytes

    def ram(self, unit: Part) -> torch.Tensor:
        """The part of the unit's slab in RAM, from its beginning: all of it, or less, or nothing."""
        return self._ram[unit.index]

    def stored_at(self, unit: Part, start: int) -> tuple[TensorStore, str, int] | None:
        """(store, name, byte offset) of element `start` of the unit's slab; None where it lives in RAM."""
        cut = self._cuts[unit.index]
        if start < cut or start >= unit.layout.home_numel:
            return None
        assert self.store is not None
        return self.store, unit.name, (start - cut) * unit.layout.dtype.itemsize

    def rest(self, unit: Part) -> tuple[TensorStore, str] | None:
        """(store, name) of the part of the slab behind `ram`; None when there is none."""
        place = self.stored_at(unit, len(self.ram(unit)))
        return None if place is None else place[:2]

    def adopt(self) -> None:
        """Take over the values of the model's parameters, whose storage is here from then on: one unit after another,
        so that there is never a second copy of more than one. Values from the feed then come group by group."""
        missing = set() if self._feed is None else set(self._feed.names)
        sizes = {unit.index: self._cuts[unit.index] * unit.layout.dtype.itemsize for unit in self._units}
        in_pool = self._memory.which_pinned(list(sizes.items()))
        for unit in self._units:
            home = self._memory.take(sizes[unit.index], f"parameters of {unit.name}", pinned=unit.index in in_pool)
            self._ram[unit.index] = home.view(unit.layout.dtype)
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                if slot.name not in missing and self._owns(unit):
                    self.write(slot.name, parameter.detach())
                parameter.data = self._bound(unit, slot)
        if self._owned is not None and not self._owned:
            return
        for group in () if self._feed is None else self._feed.groups():
            while group:  # which then holds no value while the next ones are made
                name, value = group.popitem()
                missing.discard(name)
                if not self._owns(self._slots[name][0]):
                    continue
                shape = tuple(value.spec.value_shape if isinstance(value, PackedTensor) else value.shape)
                if shape != self._slots[name][1].shape:
                    raise EngineError(f"{name}: the model has shape {self._slots[name][1].shape}, its value {shape}")
                self.write(name, value)
                del value
        assert not missing, f"the feed promised {sorted(missing)[0]} and did not give it"
        for name, (weight, is_transposed) in self._lengths.items():  # of the weights as they are used: packed ones, too
            if self._owns(self._slots[name][0]):
                self.write(name, row_lengths(self.read(weight), is_transposed=is_transposed))

    def _owns(self, unit: Part) -> bool:
        return self._owned is None or unit.index in self._owned

    def _bound(self, unit: Part, slot: Slot) -> torch.Tensor:
        runs = unit.layout.runs(slot)
        if slot.packed is None and len(runs) == 1 and runs[0][1] <= self._cuts[unit.index]:
            return self._ram[unit.index][slice(*runs[0][:2])].view(slot.shape)
        return stand_in(slot.shape, unit.layout.dtype)

    def dtype(self, name: str) -> torch.dtype:
        """The type in which a parameter is used."""
        return self._slots[name][0].dtype

    def slot(self, name: str) -> tuple[Part, Slot]:
        return self._slots[name]

    def names(self) -> list[str]:
        """Every parameter's checkpoint name, in order of need."""
        return list(self._slots)

    def read(self, name: str) -> torch.Tensor:
        """A parameter: a view of its home in RAM, or a new tensor read from the drive or expanded. EngineError."""
        unit, slot = self._slots[name]
        runs = unit.layout.runs(slot)
        if len(runs) == 1:
            found = self.read_range(unit, *runs[0][:2])
        else:
            found = torch.zeros(slot.home_numel(unit.layout.dtype.itemsize), dtype=unit.layout.dtype)
            for start, stop, at in runs:
                found[at : at + stop - start] = self.read_range(unit, start, stop)
        if slot.packed is not None:
            return slot.packed.unpack(found.view(torch.uint8), unit.layout.dtype)
        return found.view(slot.shape)

    def write(self, name: str, value: torch.Tensor | PackedTensor) -> None:
        """Set a parameter, rounding to its type, or packing it where its home is packed. EngineError. Parameters of
        which each has many runs are written when all of the unit have come: a drive wants whole ranges."""
        unit, slot = self._slots[name]
        if slot.packed is not None:
            data = value.data if isinstance(value, PackedTensor) else slot.packed.pack(value.to(unit.layout.dtype))
            value = data.view(unit.layout.dtype)
        elif isinstance(value, PackedTensor):  # an embedding or head of a packed checkpoint
            value = value.unpack(unit.layout.dtype)
        runs = unit.layout.runs(slot)
        if len(runs) == 1:
            self.write_range(unit, runs[0][0], value.reshape(-1))
            return
        if unit.index not in self._gathered:
            home = torch.zeros(unit.layout.home_numel, dtype=unit.layout.dtype)
            self._gathered[unit.index] = home, {other.name for other in unit.layout.slots}
        home, missing = self._gathered[unit.index]
        for start, stop, at in runs:
            home[start:stop].copy_(value.reshape(-1)[at : at + stop - start])
        missing.remove(name)
        if not missing:
            self.write_range(unit, 0, home)
            del self._gathered[unit.index]

    def read_range(self, unit: Part, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a slab, 1-D: a view of RAM, or a new tensor."""
        cut, ram = self._cuts[unit.index], self._ram[unit.index]
        if stop <= cut:
            return ram[start:stop]
        value = torch.empty(stop - start, dtype=unit.layout.dtype)
        in_ram = max(0, cut - start)
        value[:in_ram] = ram[start : start + in_ram]
        place = self.stored_at(unit, start + in_ram)
        assert place is not None
        store, name, offset_bytes = place
        _wait(store.submit_read(name, value[in_ram:], offset_bytes), f"the parameters of {unit.name} could not be read")
        return value

    def write_range(self, unit: Part, start: int, value: torch.Tensor) -> None:
        """Set elements [start, start + len(value)) of a slab."""
        cut, ram = self._cuts[unit.index], self._ram[unit.index]
        in_ram = min(max(0, cut - start), len(value))
        ram[start : start + in_ram].copy_(value[:in_ram])
        if in_ram == len(value):
            return
        place = self.stored_at(unit, start + in_ram)
        assert place is not None
        store, name, offset_bytes = place
        rest = value[in_ram:].to(unit.layout.dtype).contiguous()
        _wait(store.submit_write(name, rest, offset_bytes), f"the parameters of {unit.name} could not be written")


def _spec(unit: Part, cut: int) -> TensorSpec:
    return TensorSpec(unit.name, unit.layout.dtype, (unit.layout.home_numel - cut,))


def _wait(transfer: Transfer, what: str) -> None:
    try:
        transfer.wait(TIMEOUT_S)
    except (StorageError, RuntimeError, TimeoutError) as error:
        raise EngineError(f"{what}: {error}") from error


class WeightSource(Protocol):
    """Source of a part's weights: knows where they are, and whether they may be read yet."""

    def ram(self, unit: Part) -> torch.Tensor:
        """The part's parameters in RAM, 1-D; the rest of them, if any, are at `stored`."""
        ...

    def stored(self, unit: Part) -> tuple[TensorStore, str] | None:
        """Place on NVMe where the rest of the part's parameters lives; None when all are in RAM."""
        ...

    def cached(self, unit: Part) -> torch.Tensor | None:
        """1-D end of the part's rest on NVMe that RAM holds as well, until the part's use after this one; None if RAM
        has none. Ask once the part is current."""
        ...

    def is_current(self, unit: Part) -> bool:
        """Whether the last change to the part has been made."""
        ...

    def wait_current(self, unit: Part) -> None:
        """Block until the last change to the part has been made; raises the error that stopped it."""
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
        """Instructions to expand a part's bytes at an address again."""
        self.as_they_are = frozenset[int]()
        """Indices of parts whose packed bytes are multiplied without being expanded, for now."""

    @property
    def device_bytes(self) -> int:
        return self._buffer.nbytes

    def expands(self, part: Part) -> bool:
        """Whether the part's bytes are expanded for each use."""
        packed = bool(part.layout.packed_slots)
        return packed and part.index in self._indices and part.index not in self.as_they_are

    def slab(self, part: Part, home: torch.Tensor) -> torch.Tensor:
        """The part's slab on the device, made from the bytes of its home. It is valid until the next call. A packed
        part that is not expanded gives the bytes themselves (uint8)."""
        if not self.expands(part):
            has_bytes = part.layout.packed_slots or part.index in self.as_they_are
            return home.view(torch.uint8 if has_bytes else part.layout.dtype)
        slab = self._buffer[: part.layout.size_bytes].view(part.layout.dtype)
        place = part.index, home.data_ptr()
        if len(self._again) > 8 * len(self._indices):  # of memory that came and went
            self._again.clear()
        self._again[place] = part.layout.expand(home.view(torch.uint8), slab, self._again.get(place, ()))
        return slab
