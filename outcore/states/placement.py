"""Which chunks of optimizer states live in RAM and which on NVMe: as many in RAM as fit, the others spread evenly.

A drive is fastest when it is always busy. So every part of the model has the same share of its states there: with half
of them on NVMe every unit has about half of its bytes there. A chunk keeps master and moments together. Each byte of
either is read and written once a step, so moving one kind before the other would save nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from outcore.common.errors import EngineError
from outcore.common.quantities import round_up
from outcore.flow.parts import Part
from outcore.optim import BLOCK_NUMEL, ChunkJob, StateFormat
from outcore.optim.formats import Tail, tail_of
from outcore.storage import TensorStore


class Updatable(Protocol):
    """Unit of the optimizer's work: one part of a model, or a rank's share of one parameter."""

    @property
    def index(self) -> int:
        """Place in the order of updates."""
        ...

    @property
    def name(self) -> str:
        """Name in messages and in the store."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of its parameters."""
        ...


@dataclass
class StateChunk:
    """States of the parameters [start, stop) of one unit's trainable range."""

    unit: Updatable
    start: int
    stop: int
    element_offset: int
    """Index of this chunk's first parameter within the whole model. Seeds stochastic rounding, so a chunk rounds alike
    wherever it lives."""
    state_format: StateFormat
    """Compressed on a drive, if the engine says so (`spill`)."""
    on_nvme: bool = False
    buffer: torch.Tensor | None = None
    """uint8 [n_bytes] when it lives in RAM."""
    matrix: tuple[int, int] | None = None
    """Shape of the parameter that Muon updates here; None: AdamW updates what is here, of whatever shape."""
    undecayed: tuple[tuple[int, int], ...] = ()
    """Range [start, stop) within the chunk that has no weight decay, as in `ChunkJob`."""
    tail: Tail | None = None
    """Tail of compressed states: the part of the tail that the drive has, and where it belongs in memory."""

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def n_bytes(self) -> int:
        """Bytes of the chunk in memory."""
        return self.state_format.chunk_bytes(self.numel)

    @property
    def moved_bytes(self) -> int:
        """Bytes that a drive moves to read or to write the chunk, without its tails."""
        return self.state_format.fixed_bytes(self.numel)

    @property
    def name(self) -> str:
        """Key of the chunk in the scratch store."""
        return f"states of {self.unit.name} from {self.start}"

    def job(self, grad: torch.Tensor, states: torch.Tensor, param: torch.Tensor | None) -> ChunkJob:
        """Update of this chunk, wherever its three pieces lie."""
        return ChunkJob(grad, states, param, self.element_offset, self.undecayed)


class GradPlace(NamedTuple):
    """Place where a chunk's gradient lies on the drive, in whole blocks, and of what type it is."""

    store: TensorStore
    name: str
    offset_bytes: int
    dtype: torch.dtype


class ChunkHomes(Protocol):
    """Places where the three pieces of an update lie, chunk by chunk."""

    @property
    def state_store(self) -> TensorStore | None:
        """Holds the states of chunks on NVMe, by the chunks' names."""
        ...

    def param_piece(self, chunk: StateChunk) -> torch.Tensor | None:
        """The chunk's parameters in RAM; None when they live on NVMe."""
        ...

    def param_place(self, chunk: StateChunk) -> tuple[TensorStore, str, int]:
        """(store, name, byte offset) of the chunk's parameters where `param_piece` is None."""
        ...

    def grad_place(self, chunk: StateChunk) -> GradPlace | None:
        """Place where the chunk's gradient lies on the drive; None when it is in RAM."""
        ...


def check_tail(chunk: StateChunk, states: torch.Tensor) -> None:
    """EngineError unless the head of compressed `states`, as the drive gave it, says what was written last."""
    expected = chunk.tail or Tail(chunk.state_format.fixed_bytes(chunk.numel), 0)
    try:
        found = tail_of(chunk.state_format, states, chunk.numel)
    except ValueError as error:
        raise EngineError(f"the drive gave back other bytes of the {chunk.name} than were written: {error}") from error
    if found != expected:
        raise EngineError(
            f"the drive gave back other bytes of the {chunk.name} than were written: {found.size_bytes} bytes of tail "
            f"at {found.offset_bytes} instead of {expected.size_bytes} at {expected.offset_bytes}"
        )


def cut_states(
    units: Sequence[Part],
    state_format: StateFormat,
    chunk_numel: int,
    *,
    muon: frozenset[int] = frozenset(),
    undecayed: frozenset[str] = frozenset(),
) -> dict[int, list[StateChunk]]:
    """Unit index -> its chunks, none of which has a home yet. `muon`: indices of units whose matrices have a momentum
    alone, each in a chunk of its own. `undecayed`: names of parameters without weight decay. ValueError for a size that
    cuts blocks in two."""
    if chunk_numel <= 0 or chunk_numel % BLOCK_NUMEL:
        raise ValueError(f"chunk_numel must be a positive multiple of {BLOCK_NUMEL}, got {chunk_numel}")
    chunks: dict[int, list[StateChunk]] = {}
    element_offset = 0
    for unit in units:
        chunks[unit.index] = cut = []
        at, numel = 0, unit.layout.trainable_numel
        matrices = [slot for slot in unit.layout.trainable_slots if unit.index in muon and len(slot.shape) == 2]
        for slot in [*matrices, None]:
            upto = numel if slot is None else slot.offset
            for start in range(at, upto, chunk_numel):
                stop = min(start + chunk_numel, upto)
                cut.append(StateChunk(unit, start, stop, element_offset + start, state_format))
            if slot is not None:
                at = round_up(slot.end, BLOCK_NUMEL)
                rows, columns = slot.shape
                own = state_format.without_squares
                cut.append(StateChunk(unit, slot.offset, at, element_offset + slot.offset, own, matrix=(rows, columns)))
        element_offset += numel
        for chunk in cut:
            chunk.undecayed = _undecayed_in(unit, chunk, undecayed)
    return chunks


def _undecayed_in(unit: Part, chunk: StateChunk, names: frozenset[str]) -> tuple[tuple[int, int], ...]:
    """Ranges of a chunk that belong to these parameters, with the gaps behind them; neighbours are merged."""
    found: list[tuple[int, int]] = []
    for slot in unit.layout.trainable_slots:
        start = max(slot.offset, chunk.start) - chunk.start
        stop = min(round_up(slot.end, BLOCK_NUMEL), chunk.stop) - chunk.start
        if slot.name in names and start < stop:
            joins = found and found[-1][1] == start
            found[-1:] = [(found[-1][0], stop)] if joins else [*found[-1:], (start, stop)]
    return tuple(found)


def spill(chunks: Sequence[StateChunk], ram_bytes: int | None, *, compress: bool = False) -> None:
    """Decide `on_nvme` of every chunk (given in order of need); None: everything fits into RAM.

    `compress`: those on NVMe take the form with the fewest bytes (`StateFormat.on_drive`), but for Muon's matrices,
    which a GPU takes as they are."""
    in_ram = spread([chunk.state_format.chunk_bytes(chunk.numel) for chunk in chunks], ram_bytes)
    for chunk, stays in zip(chunks, in_ram, strict=True):
        chunk.on_nvme = not stays
        if chunk.on_nvme and compress and chunk.matrix is None:
            chunk.state_format = chunk.state_format.on_drive


def spread(sizes_bytes: Sequence[int], ram_bytes: int | None) -> list[bool]:
    """Choose the pieces that stay in RAM: together at most `ram_bytes`, and no further piece would fit.

    Up to any piece, those in RAM are `ram_bytes / total` of the bytes so far, to within a piece or two."""
    total_bytes = sum(sizes_bytes)
    if ram_bytes is None or ram_bytes >= total_bytes:
        return [True] * len(sizes_bytes)
    in_ram: list[bool] = []
    so_far_bytes = taken_bytes = 0
    for size_bytes in sizes_bytes:
        so_far_bytes += size_bytes
        stays = (taken_bytes + size_bytes) * total_bytes <= ram_bytes * so_far_bytes
        taken_bytes += size_bytes if stays else 0
        in_ram.append(stays)
    for index, size_bytes in enumerate(sizes_bytes):  # less than one piece's room is left: small pieces may fit
        if not in_ram[index] and taken_bytes + size_bytes <= ram_bytes:
            in_ram[index] = True
            taken_bytes += size_bytes
    return in_ram
