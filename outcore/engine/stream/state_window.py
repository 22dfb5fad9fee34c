"""Chunks of states on NVMe as a checkpoint reads and writes them: one in memory at a time, only the regions asked for.

A save goes through the parameters once per family (master, exp_avg, exp_avg_sq), in order, so neighbouring parameters
find the same chunk in memory and each region crosses the link once: the states are read once per save, written once per
load (8-bit moments twice: their codes and scales lie together). What was written goes back when another chunk is
opened, or with `flush`, which must come before the chunks are updated: what is in memory would be old then.
"""

from __future__ import annotations

import torch

from outcore.engine.stream.host_memory import pageable
from outcore.engine.stream.placement import StateChunk
from outcore.optim import ChunkState, StateFormat
from outcore.optim.chunk_state import StateName
from outcore.storage import TensorStore

TIMEOUT_S = 600.0


class StateWindow:
    """No update of these chunks may be under way, nor may they wait in the ring (`UnitUpdates.drain`)."""

    def __init__(self, store: TensorStore, state_format: StateFormat) -> None:
        self._store, self._format = store, state_format
        self._memory: torch.Tensor | None = None
        self._chunk: StateChunk | None = None
        self._loaded: set[str] = set()
        self._dirty: set[str] = set()

    def open(
        self, chunk: StateChunk, family: StateName, param: torch.Tensor | None, *, to_write: bool = False
    ) -> ChunkState:
        """The chunk with the states of `family` in place; only those mean anything. `param`: its parameters."""
        if chunk is not self._chunk:
            self._move_to(chunk)
        buffer = self._buffer(chunk)
        regions = [region for name, region in self._format.regions(chunk.numel).items() if _belongs(name, family)]
        missing = [region for region in regions if region.name not in self._loaded]
        transfers = [
            self._store.submit_read(
                chunk.name,
                buffer[region.offset_bytes : region.offset_bytes + region.size_bytes],
                region.offset_bytes,
            )
            for region in missing
        ]
        for region, transfer in zip(missing, transfers, strict=True):
            transfer.wait(TIMEOUT_S)
            self._loaded.add(region.name)
        if to_write:
            self._dirty |= {region.name for region in regions}
        return ChunkState(self._format, buffer, chunk.numel, param)

    def flush(self) -> None:
        """Write back what was changed, forget what was read and free the memory."""
        self._write_back()
        self._chunk = self._memory = None

    def _buffer(self, chunk: StateChunk) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < chunk.n_bytes:
            self._memory = pageable(chunk.n_bytes)
        return self._memory[: chunk.n_bytes]

    def _move_to(self, chunk: StateChunk) -> None:
        self._write_back()
        self._chunk = chunk
        self._loaded = set()

    def _write_back(self) -> None:
        chunk = self._chunk
        if chunk is None or not self._dirty:
            return
        buffer, regions = self._buffer(chunk), self._format.regions(chunk.numel)
        transfers = []
        for name in sorted(self._dirty):
            at = regions[name]
            piece = buffer[at.offset_bytes : at.offset_bytes + at.size_bytes]
            transfers.append(self._store.submit_write(chunk.name, piece, at.offset_bytes))
        self._dirty = set()
        for transfer in transfers:
            transfer.wait(TIMEOUT_S)


def _belongs(region: str, family: StateName) -> bool:
    """8-bit moments are read together: a `ChunkState` decodes both."""
    if family == "master":
        return region in ("master", "residual")
    return region == family or region.endswith(("_code", "_scale"))
