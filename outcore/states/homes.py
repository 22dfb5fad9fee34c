"""Homes: where the 16-bit parameters and optimizer states of every unit live, in RAM or on NVMe.

Parameters are in `weights` (RAM, NVMe, or a part of a unit in each), gradients wait in RAM with the engine. Optimizer
states come in chunks of up to `chunk_numel` parameters (one buffer each, see `outcore.optim.formats.state_format`), the
form in which they can be updated, moved and saved. Bytes per trainable parameter: 2 (parameter) and the format's, e.g.
12 for `fp32`.

Residency is decided chunk by chunk (`placement`). An update needs three pieces: gradient, states, parameter. Chunks
that have all of it in RAM are updated in place (`jobs`); the others flow through the ring (`flowing`), whose slots take
the states when they live on NVMe, and the parameter piece when that does (`param_piece` is then None, `param_place`
says where): read first where the format needs it (split), written back always (`ring/slots`).

Optimizer states chunk by chunk: those in RAM in a buffer each, those on NVMe behind a window of one chunk.

Second homes of states: an update that may have to be taken back writes there, and leaves the first ones alone.

With a global gradient norm no update counts before the last gradient is there. An optimistic update starts sooner, as
if nothing had to be clipped. It writes the new states to second homes, which costs no more traffic than an update in
place. Parameters are written in place, because other parts of the engine have their addresses, and a copy of the old
ones is kept. When the norm is known the second homes become the first (`stand`), or the old parameters return
(`take_back`).

Chunks of states on NVMe as a checkpoint reads and writes them: one in memory at a time, only the regions asked for.

A save goes through the parameters once per family (master, exp_avg, exp_avg_sq), in order, so neighbouring parameters
find the same chunk in memory and each region crosses the link once: the states are read once per save, written once per
load, which sets both moments of a chunk together. Changes reach the drive when another chunk is opened, or by `flush`.
Call it before the chunks are updated, because the copy in memory would be old then.

Compressed moments are expanded where they were read and compressed before they are written, so callers see the plain
format. Both go back together, as they share heads and tail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import round_up
from outcore.flow.parts import Part
from outcore.flow.weights import Scratch, WeightHomes
from outcore.optim import (
    BLOCK_NUMEL,
    STATE_NAMES,
    Backend,
    ChunkJob,
    ChunkState,
    JobBatch,
    MatrixJob,
    StateFormat,
    open_backend,
)
from outcore.optim.formats import StateName, Tail, tail_of
from outcore.staging.pool import HostMemory, pageable
from outcore.states.placement import GradPlace, StateChunk, check_tail
from outcore.storage import TensorSpec, TensorStore, Transfer

MOMENTS: tuple[StateName, ...] = ("exp_avg", "exp_avg_sq")


class StateWindow:
    """No update of these chunks may be under way, nor may they wait in the ring (whoever updates them drains that
    first).

    `backend`: of the optimizer, which compresses and expands.

    EngineError where the drive gives back other bytes than were written, as far as that shows."""

    def __init__(self, store: TensorStore, backend: Backend) -> None:
        self._store, self._backend = store, backend
        self._memory: dict[str, torch.Tensor] = {}
        """Memory by use: `plain` has the format that callers see, `compressed` the drive's."""
        self._chunk: StateChunk | None = None
        self._loaded: set[str] = set()
        self._dirty: set[str] = set()

    def open(
        self, chunk: StateChunk, family: StateName, param: torch.Tensor | None, *, to_write: bool = False
    ) -> ChunkState:
        """The chunk with the states of `family` in place; only those mean anything. `param`: its parameters."""
        if chunk is not self._chunk:
            self._move_to(chunk)
        plain = chunk.state_format.plain
        buffer = self._buffer("plain", plain.chunk_bytes(chunk.numel))
        families = MOMENTS if chunk.state_format.compressed and to_write and family in MOMENTS else (family,)
        names = [n for n in plain.regions(chunk.numel) if any(_belongs(n, wanted) for wanted in families)]
        missing = [name for name in names if name not in self._loaded]
        if chunk.state_format.compressed and family in MOMENTS:
            self._expand(chunk, missing)
        else:
            self._wait(self._submit(chunk, missing, to_write=False))
        self._loaded.update(missing)
        if to_write:
            self._dirty.update(names)
        return ChunkState(plain, buffer, chunk.numel, param)

    def flush(self) -> None:
        """Write back what was changed, forget what was read and free the memory."""
        self._write_back()
        self._chunk = None
        self._memory = {}

    def _buffer(self, use: str, n_bytes: int) -> torch.Tensor:
        memory = self._memory.get(use)
        if memory is None or memory.numel() < n_bytes:
            memory = self._memory[use] = pageable(n_bytes)
        return memory[:n_bytes]

    def _move_to(self, chunk: StateChunk) -> None:
        self._write_back()
        self._chunk = chunk
        self._loaded = set()

    def _write_back(self) -> None:
        chunk = self._chunk
        if chunk is None or not self._dirty:
            return
        plain = self._dirty
        if chunk.state_format.compressed and plain & set(MOMENTS):
            self._compress(chunk)
            plain = plain - set(MOMENTS)
        self._wait(self._submit(chunk, sorted(plain), to_write=True))
        self._dirty = set()

    def _submit(self, chunk: StateChunk, names: Iterable[str], *, to_write: bool) -> list[Transfer]:
        """Transfers of regions that plain and compressed states have alike, at the same places."""
        plain = chunk.state_format.plain
        regions, buffer = plain.regions(chunk.numel), self._buffer("plain", plain.chunk_bytes(chunk.numel))
        submit = self._store.submit_write if to_write else self._store.submit_read
        places = [regions[name] for name in names]
        return [
            submit(chunk.name, buffer[at.offset_bytes : at.offset_bytes + at.size_bytes], at.offset_bytes)
            for at in places
        ]

    def _wait(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            transfer.wait(TIMEOUT_S)

    def _compressed_pieces(
        self, chunk: StateChunk, names: Iterable[str], tail: Tail | None
    ) -> list[tuple[int, torch.Tensor]]:
        """(offset on the drive, memory) of these moments, of heads and tail."""
        buffer = self._buffer("compressed", chunk.n_bytes)
        regions = chunk.state_format.regions(chunk.numel)
        found = []
        for name in (*names, "block_heads", "chunk_head"):
            at = regions[name]
            found.append((at.offset_bytes, buffer[at.offset_bytes : at.offset_bytes + at.size_bytes]))
        if tail is not None and tail.size_bytes:
            start = tail.offset_bytes
            found.append((chunk.moved_bytes, buffer[start : start + tail.size_bytes]))
        return found

    def _expand(self, chunk: StateChunk, names: list[str]) -> None:
        if not names:
            return
        pieces = self._compressed_pieces(chunk, names, chunk.tail)
        self._wait([self._store.submit_read(chunk.name, memory, at) for at, memory in pieces])
        check_tail(chunk, self._buffer("compressed", chunk.n_bytes))
        wanted = {name: moment for name, moment in self._moments(chunk).items() if name in names}
        self._backend.expand(chunk.state_format, self._buffer("compressed", chunk.n_bytes), **wanted)

    def _compress(self, chunk: StateChunk) -> None:
        buffer = self._buffer("compressed", chunk.n_bytes)
        self._backend.compress(chunk.state_format, buffer, **self._moments(chunk))
        tail = tail_of(chunk.state_format, buffer, chunk.numel)
        pieces = self._compressed_pieces(chunk, MOMENTS, tail)
        self._wait([self._store.submit_write(chunk.name, memory, at) for at, memory in pieces])
        chunk.tail = tail

    def _moments(self, chunk: StateChunk) -> dict[str, torch.Tensor]:
        plain = chunk.state_format.plain
        views = plain.views(self._buffer("plain", plain.chunk_bytes(chunk.numel)), chunk.numel)
        return {name: views[name] for name in MOMENTS}


def _belongs(region: str, family: StateName) -> bool:
    """8-bit moments are read together: a `ChunkState` decodes both."""
    if family == "master":
        return region in ("master", "residual")
    return region == family or region.endswith(("_code", "_scale"))


KIND = "optimizer states"


def open_store(chunks: Iterable[StateChunk], scratch: Scratch | None) -> TensorStore | None:
    """Room on the drive for the states that RAM does not hold; None when it holds all of them. EngineError."""
    specs = [
        TensorSpec(chunk.name, torch.uint8, (chunk.state_format.stored_bytes(chunk.numel),))
        for chunk in chunks
        if chunk.on_nvme
    ]
    if not specs:
        return None
    assert scratch is not None, "nvme_path is checked with the settings"
    return scratch.store(KIND, specs)


class StateBuffers:
    """States of placed chunks. `store`: from `open_store`; `backend`: of the optimizer."""

    def __init__(self, store: TensorStore | None, backend: Backend) -> None:
        self._window = StateWindow(store, backend) if store is not None else None

    def initialise(self, chunk: StateChunk, memory: HostMemory, param: torch.Tensor) -> None:
        """Give the chunk a buffer in RAM with the states that training starts from."""
        # `initialise` zeroes the whole buffer, with all of torch's threads: that makes its pages real
        pinned = chunk.matrix is not None  # it crosses to the device and back
        chunk.buffer = memory.take(chunk.n_bytes, f"states of {chunk.unit.name}", pinned=pinned, touch=False)
        ChunkState(chunk.state_format, chunk.buffer, chunk.numel, param).initialise()

    def open(self, chunk: StateChunk, family: StateName, param: torch.Tensor, *, to_write: bool = False) -> ChunkState:
        """The chunk, with the states of `family` in place where it lives on NVMe. `param`: its parameters."""
        if chunk.buffer is not None:
            return ChunkState(chunk.state_format, chunk.buffer, chunk.numel, param)
        assert self._window is not None
        return self._window.open(chunk, family, param, to_write=to_write)

    def flush(self) -> None:
        """After writes: let the drive have what was written to chunks on NVMe. Before an update: forget what was read
        of them."""
        if self._window is not None:
            self._window.flush()


@dataclass
class HousedPart:
    """Homes where one unit lives."""

    slab: torch.Tensor
    """1-D, of the parameters' type: the part of the slab that lives in RAM, from its beginning."""
    chunks: list[StateChunk]
    jobs: JobBatch | None = None
    """The chunks in RAM as the optimizer took them last."""


class Homes:
    """Locations of all states of a rank. Takes over the model's parameters: their storage is the homes' from then on.

    `chunks`: unit index -> its chunks of states, placed; `store` has room for those on NVMe. Where other processes keep
    the rest of them, these are this one's, and `adopted` waits until all weights are there. `backend`: of the
    optimizer; None: the best there is."""

    def __init__(
        self,
        units: Sequence[Part],
        memory: HostMemory,
        state_format: StateFormat,
        chunks: Mapping[int, list[StateChunk]],
        store: TensorStore | None = None,
        *,
        weights: WeightHomes,
        backend: Backend | None = None,
        adopted: Callable[[], None] = lambda: None,
    ) -> None:
        self.state_format, self.state_store = state_format, store
        self.units = tuple(units)
        self._parts = {unit.index: unit for unit in units}
        self.weights = weights
        self._buffers = StateBuffers(store, backend or open_backend())
        weights.adopt()
        adopted()
        self._homes: dict[int, HousedPart] = {}
        for unit in units:
            self._homes[unit.index] = HousedPart(weights.ram(unit), chunks[unit.index])
            for chunk in chunks[unit.index]:
                if not chunk.on_nvme:
                    self._buffers.initialise(chunk, memory, weights.read_range(unit, chunk.start, chunk.stop))

    def __getitem__(self, unit: Part) -> HousedPart:
        return self._homes[unit.index]

    def param_piece(self, chunk: StateChunk) -> torch.Tensor | None:
        """The chunk's parameters in RAM; None when they live on NVMe."""
        slab = self._homes[chunk.unit.index].slab
        return slab[chunk.start : chunk.stop] if chunk.stop <= len(slab) else None

    def param_place(self, chunk: StateChunk) -> tuple[TensorStore, str, int]:
        """(store, name, byte offset) of the chunk's parameters where `param_piece` is None."""
        place = self.weights.stored_at(self._part(chunk), chunk.start)
        assert place is not None, "a chunk's parameters live in one place"
        return place

    def grad_place(self, chunk: StateChunk) -> GradPlace | None:
        """Nowhere on a drive: gradients wait in RAM."""
        return None

    def flowing(self, unit: Part) -> list[StateChunk]:
        """The unit's chunks that are updated in the ring."""
        return [chunk for chunk in self[unit].chunks if chunk.on_nvme or self.param_piece(chunk) is None]

    def jobs(self, unit: Part, grad: torch.Tensor) -> JobBatch | None:
        """The unit's other chunks as the optimizer takes them; None when there are none."""
        home = self[unit]
        jobs: list[ChunkJob] = []
        for chunk in home.chunks:
            param = self.param_piece(chunk)
            if chunk.buffer is not None and param is not None and chunk.matrix is None:
                jobs.append(chunk.job(grad[chunk.start : chunk.stop], chunk.buffer, param))
        if not jobs:
            return None
        if home.jobs is None:
            home.jobs = JobBatch(self.state_format, jobs)
        elif home.jobs.grads[0].data_ptr() != jobs[0].grad.data_ptr():
            home.jobs = home.jobs.with_grads([job.grad for job in jobs])
        return home.jobs

    def matrices(self, unit: Part, grad: torch.Tensor) -> list[MatrixJob]:
        """The unit's chunks in RAM that Muon updates."""
        jobs: list[MatrixJob] = []
        for chunk in self[unit].chunks:
            param = self.param_piece(chunk)
            if chunk.matrix is not None and chunk.buffer is not None and param is not None:
                job = chunk.job(grad[chunk.start : chunk.stop], chunk.buffer, param)
                jobs.append(MatrixJob(chunk.state_format, job, chunk.matrix))
        return jobs

    def families(self, name: str) -> tuple[StateName, ...]:
        """Names of a trainable parameter's states; a matrix that Muon updates has no exp_avg_sq."""
        _, slot = self.weights.slot(name)
        is_matrix = any(chunk.matrix is not None for chunk, *_ in self._pieces(name, slot.end))
        return STATE_NAMES[:2] if is_matrix else STATE_NAMES

    def read_state(self, name: str, family: StateName, into: torch.Tensor | None = None) -> torch.Tensor:
        """master, exp_avg or exp_avg_sq of a trainable parameter as a new fp32 tensor of its shape, or in `into` (fp32
        [numel]), whose values stay where this process has no chunk."""
        _, slot = self.weights.slot(name)
        value = torch.empty(slot.numel, dtype=torch.float32) if into is None else into
        for chunk, at, start, stop in self._pieces(name, slot.end):
            inside = min(stop, start + slot.numel - at)
            value[at : at + inside - start] = self._open(chunk, family).read(family, start, inside)
        return value.view(slot.shape)

    def write_states(self, name: str, values: Mapping[StateName, torch.Tensor]) -> None:
        """Set these states of a parameter, chunk by chunk: families that lie together on the drive (both moments) cross
        its link once when they are given together. The parameter follows its master."""
        _, slot = self.weights.slot(name)
        end = round_up(slot.end, BLOCK_NUMEL)  # 8-bit moments are written in whole blocks; the gap's are zero
        for chunk, at, start, stop in self._pieces(name, end):
            for family, value in values.items():
                given = value.reshape(-1)[at : at + stop - start]
                piece = torch.zeros(stop - start, dtype=torch.float32)
                piece[: given.numel()] = given
                if family == "exp_avg_sq":
                    piece.add_(0.0)  # -0 as 0: on NVMe it has no sign, and it must be the same bits wherever it lives
                state = self._open(chunk, family, to_write=True)
                state.write(family, piece, start)
                if family == "master" and self.param_piece(chunk) is None:
                    assert state.param is not None
                    self.weights.write_range(self._part(chunk), chunk.start, state.param)

    def has_states(self, name: str) -> bool:
        """Tell whether any state of a parameter is kept here."""
        _, slot = self.weights.slot(name)
        return bool(self._pieces(name, slot.end))

    def flush_states(self) -> None:
        """After `write_states`: let the drive have what was written to chunks on NVMe. Before an update: forget what
        was read of them."""
        self._buffers.flush()

    def _open(self, chunk: StateChunk, family: StateName, *, to_write: bool = False) -> ChunkState:
        param = self.param_piece(chunk)
        if param is None and family == "master":
            param = self.weights.read_range(self._part(chunk), chunk.start, chunk.stop)
        elif param is None:  # moments do not look at it
            param = torch.empty(chunk.numel, dtype=chunk.unit.dtype)
        return self._buffers.open(chunk, family, param, to_write=to_write)

    def _part(self, chunk: StateChunk) -> Part:
        return self._parts[chunk.unit.index]

    def _pieces(self, name: str, end: int) -> list[tuple[StateChunk, int, int, int]]:
        """(chunk, offset within the parameter, start and stop within the chunk) of [slot.offset, end)."""
        unit, slot = self.weights.slot(name)
        found = []
        for chunk in self[unit].chunks:
            start, stop = max(slot.offset, chunk.start), min(end, chunk.stop)
            if start < stop:
                found.append((chunk, start - slot.offset, start - chunk.start, stop - chunk.start))
        return found


@dataclass
class _Second:
    """One part's."""

    states: list[torch.Tensor]
    """One uint8 buffer for each chunk, as large as the chunk's own states."""
    params: torch.Tensor
    """[trainable parameters], of their type, as they were before the update."""
    jobs: JobBatch | None = None
    """Update that was submitted, until it is accepted or taken back."""
    is_real: bool = False
    """True once the buffer was written to: only then do its pages take RAM."""

    @property
    def size_bytes(self) -> int:
        return sum(one.nbytes for one in (*self.states, self.params))


class SecondHomes:
    """Second homes of these parts."""

    def __init__(self, homes: Homes, parts: Iterable[Part], memory: HostMemory) -> None:
        self._homes, self._seconds = homes, dict[int, _Second]()
        self.size_bytes = 0
        for part in parts:
            chunks = homes[part].chunks
            sizes = [chunk.n_bytes for chunk in chunks] + [sum(chunk.numel for chunk in chunks) * part.dtype.itemsize]
            *states, params = (
                memory.take(n_bytes, f"second home of {part.name}", pinned=False, touch=False) for n_bytes in sizes
            )
            self._seconds[part.index] = _Second(states, params.view(part.dtype))
            self.size_bytes += sum(sizes)

    @property
    def real_bytes(self) -> int:
        """RAM that they take by now."""
        return sum(second.size_bytes for second in self._seconds.values() if second.is_real)

    def jobs(self, part: Part, grad: torch.Tensor) -> JobBatch | None:
        """The part's update with `grad` as it can be taken back; None where it has no second home."""
        second = self._seconds.get(part.index)
        if second is None:
            return None
        jobs = self._homes.jobs(part, grad)
        assert jobs is not None and len(jobs) == len(second.states), "all of the part's states are in RAM"
        second.jobs = jobs.ahead(second.states, second.params)
        return second.jobs

    def stand(self, part: Part) -> None:
        """The update handed out last counts: what it writes are the states from now on."""
        home, second = self._homes[part], self._seconds[part.index]
        for number, chunk in enumerate(home.chunks):
            assert chunk.buffer is not None
            chunk.buffer, second.states[number] = second.states[number], chunk.buffer
        home.jobs, second.jobs, second.is_real = None, None, True

    def take_back(self, part: Part) -> None:
        """The update handed out last, which has ended, does not count: its parameters are what they were before."""
        second = self._seconds[part.index]
        jobs = second.jobs
        assert jobs is not None
        for job in jobs.jobs:
            if job.param is not None and job.kept is not None:
                job.param.copy_(job.kept)
        second.jobs, second.is_real = None, True
