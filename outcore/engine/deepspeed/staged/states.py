"""Optimizer states of a rank's shares, and their update by the CPU optimizer that both engines share.

The gradients are read where DeepSpeed accumulated them and the 16-bit parameters are written where the next forward
takes them from: no fp32 copy of either exists. Unscaling, clipping, AdamW and the cast are one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outcore.engine.deepspeed.staged.shares import Chunk, Share
from outcore.engine.stream.host_memory import HostMemory
from outcore.optim import AdamWHyper, ChunkJob, ChunkState, JobBatch, OptimizerPool, StateFormat
from outcore.optim.chunk_state import STATE_NAMES, StateName

HyperOf = Callable[[int], AdamWHyper]
"""Hyper-parameters of this update by parameter group."""


@dataclass
class _Unit:
    """What is submitted to the optimizer at once: a sub-group's chunks of one parameter group."""

    number: int
    param_group: int
    chunks: list[Chunk]
    jobs: JobBatch


class RamStates:
    """All states in RAM. `shares` in order of update."""

    def __init__(
        self, shares: Sequence[Share], state_format: StateFormat, memory: HostMemory, optimizer: OptimizerPool
    ) -> None:
        self.shares, self.state_format, self._optimizer = shares, state_format, optimizer
        self._chunks: dict[int, list[tuple[Chunk, torch.Tensor]]] = {}
        for share in shares:
            kept = self._chunks[share.ds_id] = []
            for chunk in share.chunks():
                buffer = memory.take(state_format.chunk_bytes(chunk.numel), "optimizer states", pinned=False)
                kept.append((chunk, buffer))
        self._units = self._make_units()
        self.reset()

    def _make_units(self) -> list[_Unit]:
        grouped: dict[tuple[int, int], list[tuple[Chunk, torch.Tensor]]] = {}
        for share in self.shares:
            grouped.setdefault((share.unit, share.param_group), []).extend(self._chunks[share.ds_id])
        units = []
        for (number, param_group), kept in sorted(grouped.items(), key=lambda item: item[0]):
            if not kept:
                continue
            jobs = [ChunkJob(chunk.grad, buffer, chunk.param, chunk.element_offset) for chunk, buffer in kept]
            units.append(_Unit(number, param_group, [c for c, _ in kept], JobBatch(self.state_format, jobs)))
        return units

    def reset(self) -> None:
        """Zero moments, masters from the parameters as they are."""
        for kept in self._chunks.values():
            for chunk, buffer in kept:
                ChunkState(self.state_format, buffer, chunk.numel, chunk.param).initialise()

    def update(self, hyper_of: HyperOf) -> None:
        """One AdamW step on everything; returns when the parameters are up to date. UpdateFailed, TimeoutError."""
        tickets = [
            self._optimizer.submit(f"sub-group {unit.number}", index, unit.jobs, hyper_of(unit.param_group))
            for index, unit in enumerate(self._units)
        ]
        for ticket in tickets:
            self._optimizer.wait(ticket)

    def read(self, share: Share, name: StateName) -> torch.Tensor:
        """One state of a share as a new fp32 tensor [numel]."""
        value = torch.empty(share.numel, dtype=torch.float32)
        for chunk, buffer in self._chunks[share.ds_id]:
            state = ChunkState(self.state_format, buffer, chunk.numel, chunk.param)
            value[chunk.start : chunk.stop] = state.read(name)
        return value

    def write(self, share: Share, values: dict[StateName, torch.Tensor]) -> None:
        """Set states of a share from fp32 tensors [numel]; its parameters follow the master."""
        for chunk, buffer in self._chunks[share.ds_id]:
            state = ChunkState(self.state_format, buffer, chunk.numel, chunk.param)
            for name in STATE_NAMES:
                if name in values:
                    state.write(name, values[name][chunk.start : chunk.stop])
