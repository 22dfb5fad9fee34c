"""Homes: where the 16-bit parameters, gradients and optimizer states of every unit live, in RAM or on NVMe.

Parameters are in `weights` (RAM, NVMe, or a part of a unit in each). Optimizer states come in chunks of up to
`chunk_numel` parameters (one buffer each, see `outcore.optim.formats`), the form in which they can be updated, moved
and saved. Bytes per trainable parameter: 2 (parameter) + 2 (gradient) + the format's, e.g. 12 for `fp32`.

Residency is decided per chunk: `StateChunk.buffer` is its RAM, None where it lives in the scratch store under
`StateChunk.name`. An update needs three pieces: gradient, states, parameter. `param_piece` gives the parameter's RAM,
None when it lives on NVMe (at `weights.stored_at(unit, chunk.start)`, whole chunks): then whoever brings a chunk's
states into a slot of the ring brings the parameter piece beside them, read first where the format needs it (split),
written back always.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outcore.engine.stream.host_memory import HostMemory
from outcore.engine.stream.layout import ALIGN_NUMEL, Slot
from outcore.engine.stream.units import Unit
from outcore.engine.stream.weights import WeightHomes, plan_cuts
from outcore.optim import ChunkJob, ChunkState, JobBatch, StateFormat
from outcore.optim.chunk_state import StateName
from outcore.units import round_up

CHUNK_NUMEL = 1 << 22
"""Parameters per chunk of states: 48 MiB of fp32 states, large enough for a drive, many to a layer."""


@dataclass(frozen=True)
class StateChunk:
    """States of the parameters [start, stop) of one unit's trainable range."""

    unit: Unit
    start: int
    stop: int
    element_offset: int
    """Of the first parameter in the model: the key of stochastic rounding."""
    name: str
    """In the scratch store."""
    n_bytes: int
    buffer: torch.Tensor | None
    """uint8 [n_bytes] in RAM; None: on NVMe."""

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass
class UnitHome:
    """Where one unit lives."""

    slab: torch.Tensor
    """1-D, of the parameters' type: the part of the slab that lives in RAM, from its beginning."""
    grad: torch.Tensor
    """[layout.trainable_numel]; what the optimizer reads."""
    chunks: list[StateChunk]
    jobs: JobBatch | None
    """The chunks in RAM as the optimizer takes them; None when there are none."""


class Homes:
    """All homes. Takes over the model's parameters: their storage is the homes' from then on.

    `weights`: None puts all parameters in RAM.
    """

    def __init__(
        self,
        units: list[Unit],
        memory: HostMemory,
        state_format: StateFormat,
        *,
        weights: WeightHomes | None = None,
        grad_dtype: torch.dtype | None = None,
        chunk_numel: int = CHUNK_NUMEL,
    ) -> None:
        if chunk_numel <= 0 or chunk_numel % ALIGN_NUMEL:
            raise ValueError(f"chunk_numel must be a positive multiple of {ALIGN_NUMEL}, got {chunk_numel}")
        self.state_format = state_format
        self._chunk_numel = chunk_numel
        if weights is None:
            weights = WeightHomes(units, memory, plan_cuts(units, (), None, chunk_numel), None)
        self.weights = weights
        weights.adopt()
        self._homes: dict[int, UnitHome] = {}
        element_offset = 0
        for unit in units:
            self._homes[unit.index] = self._adopt(unit, memory, grad_dtype or unit.layout.dtype, element_offset)
            element_offset += unit.layout.trainable_numel

    def _adopt(self, unit: Unit, memory: HostMemory, grad_dtype: torch.dtype, element_offset: int) -> UnitHome:
        layout = unit.layout
        slab = self.weights.ram(unit)
        numel = layout.trainable_numel
        grad_bytes = numel * grad_dtype.itemsize
        grad = memory.take(grad_bytes, f"gradients of {unit.name}").view(grad_dtype)
        chunks: list[StateChunk] = []
        jobs: list[ChunkJob] = []
        for start in range(0, numel, self._chunk_numel):
            stop = min(start + self._chunk_numel, numel)
            n_bytes = self.state_format.chunk_bytes(stop - start)
            buffer = memory.take(n_bytes, f"states of {unit.name}", pinned=False)
            name = f"states {unit.name} {start}"
            chunk = StateChunk(unit, start, stop, element_offset + start, name, n_bytes, buffer)
            ChunkState(self.state_format, buffer, chunk.numel, slab[start:stop]).initialise()
            chunks.append(chunk)
            jobs.append(ChunkJob(grad[start:stop], buffer, slab[start:stop], chunk.element_offset))
        return UnitHome(slab, grad, chunks, JobBatch(self.state_format, jobs) if jobs else None)

    def __getitem__(self, unit: Unit) -> UnitHome:
        return self._homes[unit.index]

    def param_piece(self, chunk: StateChunk) -> torch.Tensor | None:
        """The chunk's parameters in RAM; None when they live on NVMe."""
        slab = self[chunk.unit].slab
        return slab[chunk.start : chunk.stop] if chunk.stop <= len(slab) else None

    def slot(self, name: str) -> Slot:
        return self.weights.slot(name)[1]

    def weight(self, name: str) -> torch.Tensor:
        """A parameter as it is used in the forward: a view of its home in RAM, or a new tensor read from NVMe."""
        return self.weights.read(name)

    def read_state(self, name: str, family: StateName) -> torch.Tensor:
        """master, exp_avg or exp_avg_sq of a trainable parameter as a new fp32 tensor of its shape."""
        _, slot = self.weights.slot(name)
        value = torch.empty(slot.numel, dtype=torch.float32)
        for chunk, at, start, stop in self._pieces(name, slot.end):
            inside = min(stop, start + slot.numel - at)
            value[at : at + inside - start] = self._opened(chunk).read(family, start, inside)
        return value.view(slot.shape)

    def write_state(self, name: str, family: StateName, value: torch.Tensor) -> None:
        """Set it; the parameter follows its master."""
        _, slot = self.weights.slot(name)
        end = round_up(slot.end, ALIGN_NUMEL)  # 8-bit moments are written in whole blocks; the gap's are zero
        flat = torch.zeros(end - slot.offset, dtype=torch.float32)
        flat[: slot.numel] = value.reshape(-1)
        for chunk, at, start, stop in self._pieces(name, end):
            self._opened(chunk).write(family, flat[at : at + stop - start], start)

    def _opened(self, chunk: StateChunk) -> ChunkState:
        assert chunk.buffer is not None
        return ChunkState(self.state_format, chunk.buffer, chunk.numel, self.param_piece(chunk))

    def _pieces(self, name: str, end: int) -> list[tuple[StateChunk, int, int, int]]:
        """(chunk, offset within the parameter, start and stop within the chunk) of [slot.offset, end)."""
        unit, slot = self.weights.slot(name)
        found = []
        for chunk in self[unit].chunks:
            start, stop = max(slot.offset, chunk.start), min(end, chunk.stop)
            if start < stop:
                found.append((chunk, start - slot.offset, start - chunk.start, stop - chunk.start))
        return found
