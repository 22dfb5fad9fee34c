"""Homes: where the 16-bit parameters, gradients and optimizer states of every unit live, in RAM or on NVMe.

The model's own parameters are made views of these slabs, one unit after another, so there is never a second copy and
everything that reads the model on the CPU (export, names) keeps working. Optimizer states come in chunks of up to
`chunk_numel` parameters (one buffer each, see `outcore.optim.formats`), the form in which they can be updated, moved
and saved. Bytes per trainable parameter: 2 (parameter) + 2 (gradient) + the format's, e.g. 12 for `fp32`.

Residency is decided per chunk: `StateChunk.buffer` is its RAM, None where it lives in the scratch store under
`StateChunk.name`. An update needs three pieces: gradient, states, parameter. `param_piece` gives the parameter's RAM,
None when the unit's slab lives in the store too (under `slab_name`): then whoever brings a chunk's states into a slot
of the ring brings the parameter piece beside them, read first where the format needs it (split), written back always.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outcore.engine.stream.host_memory import HostMemory
from outcore.engine.stream.layout import ALIGN_NUMEL, Slot
from outcore.engine.stream.units import Unit
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
    """[layout.numel] of the parameters' type."""
    grad: torch.Tensor
    """[layout.trainable_numel]; what the optimizer reads."""
    chunks: list[StateChunk]
    jobs: JobBatch | None
    """The chunks in RAM as the optimizer takes them; None when there are none."""


class Homes:
    """All homes. Takes over the model's parameters: their storage is the slabs' from then on."""

    def __init__(
        self,
        units: list[Unit],
        memory: HostMemory,
        state_format: StateFormat,
        *,
        grad_dtype: torch.dtype | None = None,
        chunk_numel: int = CHUNK_NUMEL,
    ) -> None:
        if chunk_numel <= 0 or chunk_numel % ALIGN_NUMEL:
            raise ValueError(f"chunk_numel must be a positive multiple of {ALIGN_NUMEL}, got {chunk_numel}")
        self.state_format = state_format
        self._chunk_numel = chunk_numel
        self._homes: dict[int, UnitHome] = {}
        self._slots: dict[str, tuple[Unit, Slot]] = {}
        element_offset = 0
        for unit in units:
            self._homes[unit.index] = self._adopt(unit, memory, grad_dtype or unit.layout.dtype, element_offset)
            element_offset += unit.layout.trainable_numel
            self._slots.update({slot.name: (unit, slot) for slot in unit.layout.slots})

    def _adopt(self, unit: Unit, memory: HostMemory, grad_dtype: torch.dtype, element_offset: int) -> UnitHome:
        layout = unit.layout
        slab = memory.take(layout.size_bytes, f"parameters of {unit.name}").view(layout.dtype)
        for view, parameter in zip(layout.views(slab), unit.parameters, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
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
        """The chunk's parameters in RAM; None when their slab lives on NVMe."""
        return self[chunk.unit].slab[chunk.start : chunk.stop]

    def slab_name(self, unit: Unit) -> str:
        """Under which the unit's slab lives in the scratch store."""
        return f"weights {unit.name}"

    def names(self) -> list[str]:
        """Every parameter's checkpoint name, in order of need."""
        return list(self._slots)

    def slot(self, name: str) -> Slot:
        return self._slots[name][1]

    def weight(self, name: str) -> torch.Tensor:
        """A parameter as it is used in the forward, a view of its home."""
        unit, slot = self._slots[name]
        return self[unit].slab[slot.offset : slot.end].view(slot.shape)

    def read_state(self, name: str, family: StateName) -> torch.Tensor:
        """master, exp_avg or exp_avg_sq of a trainable parameter as a new fp32 tensor of its shape."""
        _, slot = self._slots[name]
        value = torch.empty(slot.numel, dtype=torch.float32)
        for chunk, at, start, stop in self._pieces(name, slot.end):
            inside = min(stop, start + slot.numel - at)
            value[at : at + inside - start] = self._opened(chunk).read(family, start, inside)
        return value.view(slot.shape)

    def write_state(self, name: str, family: StateName, value: torch.Tensor) -> None:
        """Set it; the parameter follows its master."""
        _, slot = self._slots[name]
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
        unit, slot = self._slots[name]
        found = []
        for chunk in self[unit].chunks:
            start, stop = max(slot.offset, chunk.start), min(end, chunk.stop)
            if start < stop:
                found.append((chunk, start - slot.offset, start - chunk.start, stop - chunk.start))
        return found
