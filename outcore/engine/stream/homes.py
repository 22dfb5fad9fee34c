"""Homes in RAM: the 16-bit parameters, gradients and optimizer states of every unit.

The model's own parameters are made views of these slabs, one unit after another, so there is never a second copy and
everything that reads the model on the CPU (export, names) keeps working. Optimizer states come in chunks of up to
`chunk_numel` parameters (one buffer each, see `outcore.optim.formats`), the form in which they can be updated, moved
and saved. Bytes per trainable parameter: 2 (parameter) + 2 (gradient) + the format's, e.g. 12 for `fp32`.
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


@dataclass
class UnitHome:
    """Where one unit lives."""

    slab: torch.Tensor
    """[layout.numel] of the parameters' type."""
    grad: torch.Tensor
    """[layout.trainable_numel]; what the optimizer reads."""
    chunks: list[ChunkState]
    jobs: JobBatch | None
    """The chunks as the optimizer takes them; None for a frozen unit."""


class RamHomes:
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
        chunks: list[ChunkState] = []
        jobs: list[ChunkJob] = []
        for start in range(0, numel, self._chunk_numel):
            stop = min(start + self._chunk_numel, numel)
            n_bytes = self.state_format.chunk_bytes(stop - start)
            buffer = memory.take(n_bytes, f"states of {unit.name}", pinned=False)
            state = ChunkState(self.state_format, buffer, stop - start, slab[start:stop])
            state.initialise()
            chunks.append(state)
            jobs.append(ChunkJob(grad[start:stop], buffer, slab[start:stop], element_offset + start))
        return UnitHome(slab, grad, chunks, JobBatch(self.state_format, jobs) if jobs else None)

    def __getitem__(self, unit: Unit) -> UnitHome:
        return self._homes[unit.index]

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
            value[at : at + inside - start] = chunk.read(family, start, inside)
        return value.view(slot.shape)

    def write_state(self, name: str, family: StateName, value: torch.Tensor) -> None:
        """Set it; the parameter follows its master."""
        _, slot = self._slots[name]
        end = round_up(slot.end, ALIGN_NUMEL)  # 8-bit moments are written in whole blocks; the gap's are zero
        flat = torch.zeros(end - slot.offset, dtype=torch.float32)
        flat[: slot.numel] = value.reshape(-1)
        for chunk, at, start, stop in self._pieces(name, end):
            chunk.write(family, flat[at : at + stop - start], start)

    def _pieces(self, name: str, end: int) -> list[tuple[ChunkState, int, int, int]]:
        """(chunk, offset within the parameter, start and stop within the chunk) of [slot.offset, end)."""
        unit, slot = self._slots[name]
        found = []
        for number, chunk in enumerate(self[unit].chunks):
            base = number * self._chunk_numel
            start, stop = max(slot.offset, base), min(end, base + chunk.numel)
            if start < stop:
                found.append((chunk, start - slot.offset, start - base, stop - base))
        return found
