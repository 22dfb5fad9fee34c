"""Optimizer states chunk by chunk: those in RAM in a buffer each, those on NVMe behind a window of one chunk."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outcore.flow.weights import Scratch
from outcore.optim import Backend, ChunkState
from outcore.optim.formats import StateName
from outcore.staging.pool import HostMemory
from outcore.states.placement import StateChunk
from outcore.states.window import StateWindow
from outcore.storage import TensorSpec, TensorStore

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
