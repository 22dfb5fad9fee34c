"""Chunks of states on NVMe as a checkpoint reads and writes them: one in memory at a time, only the regions asked for.

A save goes through the parameters once per family (master, exp_avg, exp_avg_sq), in order, so neighbouring parameters
find the same chunk in memory and each region crosses the link once: the states are read once per save, written once per
load, which sets both moments of a chunk together. What was written goes back when another chunk is opened, or with
`flush`, which must come before the chunks are updated: what is in memory would be old then.

Compressed moments are expanded where they were read and compressed before they are written, so callers see the plain
format. Both go back together, as they share heads and tail."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outcore.common.deadline import TIMEOUT_S
from outcore.optim import Backend, ChunkState
from outcore.optim.formats import StateName, Tail, tail_of
from outcore.staging.pool import pageable
from outcore.states.placement import StateChunk, check_tail
from outcore.storage import TensorStore, Transfer

MOMENTS: tuple[StateName, ...] = ("exp_avg", "exp_avg_sq")


class StateWindow:
    """No update of these chunks may be under way, nor may they wait in the ring (whoever updates them drains that
    first).

    `backend`: of the optimizer, which compresses and expands.

    EngineError where the drive gives back other bytes than were written, as far as that shows."""

    def __init__(self, store: TensorStore, backend: Backend) -> None:
        self._store, self._backend = store, backend
        self._memory: dict[str, torch.Tensor] = {}
        """Memory by use: `plain`, what callers see; `compressed`, as the drive has it."""
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
