"""Optimizer states of a rank's shares, in RAM and on NVMe, and their update by what both engines share.

The gradients are read where DeepSpeed accumulated them and the 16-bit parameters are written where the next forward
takes them from: no fp32 copy of either exists. Unscaling, clipping, AdamW and the cast are one pass over memory. Chunks
that have states, gradients and parameters in RAM are updated in place; the others flow through a ring of host buffers,
read ahead and written behind (this class is the ring's `ChunkHomes`). Updates go through the shares to and fro, so that
the ring keeps the last chunks of one for the next. Results depend on none of this.

A rank's shares: its part of every trainable parameter, which is what the optimizer updates as a unit.

States move and are updated in chunks (the streaming engine's `StateChunk`, with a share as its unit). A chunk never
crosses from one parameter into the next, so that it starts at the parameter's first element on the drive as well as in
RAM, and so that 8-bit blocks belong to one parameter. Cost: a parameter of a few elements takes a page of states of its
own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outcore.common.deadline import TIMEOUT_S, Deadline
from outcore.common.quantities import round_up
from outcore.engine.deepspeed.staged.gradients import StagedGradients
from outcore.engine.deepspeed.staged.params import StagedParams
from outcore.flow.weights import Scratch
from outcore.optim import BLOCK_NUMEL, AdamWHyper, ChunkJob, JobBatch, OptimizerPool, StateFormat
from outcore.optim.formats import STATE_NAMES, StateName
from outcore.sizing.streaming import CHUNK_NUMEL
from outcore.staging.pool import HostMemory, pageable
from outcore.states import GradPlace, RingSize, StateBuffers, StateChunk, StateRing, open_store, spill
from outcore.storage import TensorStore


@dataclass(eq=False)
class Share:
    """Part of one trainable parameter that this rank holds."""

    param: Any
    """DeepSpeed's partitioned parameter; its `ds_tensor` is the share with padding."""
    index: int
    """Position in the order of updates."""
    sub_group: int
    """DeepSpeed's; shares of one are submitted to the optimizer together."""
    numel: int
    """Elements without the padding of the last rank; may be 0 on a rank beyond the parameter's end."""
    param_group: int
    element_offset: int
    """Key of stochastic rounding: the same whatever the residency."""
    dtype: torch.dtype
    """Type of its elements."""
    grad: torch.Tensor | None
    """[numel] in RAM, what DeepSpeed accumulates into; None: on the drive."""
    home: torch.Tensor | None = None
    """[numel] in RAM, what the optimizer reads and writes; None: on the drive."""
    on_device: torch.Tensor | None = None
    """[numel] where DeepSpeed keeps the share on the device: the home is copied there after an update."""
    has_grad: bool = True
    """Whether any micro-batch of the step gave it a gradient; otherwise it counts as zero."""
    is_zeroed: bool = False
    """Whether `grad` is zero since an update without a gradient: no step, applied or skipped, has written it since."""
    loan: torch.Tensor | None = None
    """[numel with padding] of the parameters' type in the memory of `grad`: holds the share from an update until the
    next gradient, where it has no home. None: the memory does not fit, or there is none."""

    @property
    def ds_id(self) -> int:
        return self.param.ds_id

    @property
    def name(self) -> str:
        """Name in messages and in the store."""
        return f"parameter {self.ds_id}"

    def chunks(self, state_format: StateFormat, chunk_numel: int = CHUNK_NUMEL) -> list[StateChunk]:
        """All of the share, in order; no chunk has a home yet."""
        cut = []
        for start in range(0, self.numel, chunk_numel):
            stop = min(start + chunk_numel, self.numel)
            cut.append(StateChunk(self, start, stop, self.element_offset + start, state_format))
        return cut


def real_numel(ds_numel: int, padded_numel: int, rank: int) -> int:
    """Elements of a rank's share that belong to the parameter."""
    return max(0, min(padded_numel, ds_numel - rank * padded_numel))


def element_offsets(padded_numels: list[int], rank: int, world_size: int) -> list[int]:
    """Position at which each share starts in the model, in whole blocks: keys that no two shares of any rank have in
    common."""
    offsets, base = [], 0
    for padded in padded_numels:
        step = round_up(padded, BLOCK_NUMEL)
        offsets.append(base + rank * step)
        base += step * world_size
    return offsets


HyperOf = Callable[[int], AdamWHyper]
"""Hyper-parameters of this update by parameter group."""


class _Unit(NamedTuple):
    """Unit that is submitted to the optimizer at once: a sub-group's chunks of one parameter group, all in RAM."""

    sub_group: int
    param_group: int
    jobs: JobBatch


class ShareStates:
    """`shares` in order of update. `state_ram_bytes`: what of the states may live in RAM; None: all of them.

    EngineError when the drive has no room; StorageError when a transfer fails."""

    def __init__(
        self,
        shares: Sequence[Share],
        state_format: StateFormat,
        memory: HostMemory,
        optimizer: OptimizerPool,
        *,
        params: StagedParams | None,
        gradients: StagedGradients | None,
        scratch: Scratch | None,
        state_ram_bytes: int | None,
        ring: RingSize,
    ) -> None:
        self.units, self.state_format = tuple(share for share in shares if share.numel), state_format
        self._shares = {share.index: share for share in self.units}
        self._optimizer, self._params, self._gradients = optimizer, params, gradients
        self._chunks = {share.index: share.chunks(state_format) for share in self.units}
        everything = [chunk for chunks in self._chunks.values() for chunk in chunks]
        spill(everything, state_ram_bytes)
        self.state_store = open_store(everything, scratch)
        self._buffers = StateBuffers(self.state_store, optimizer.backend)
        for chunk in everything:
            if not chunk.on_nvme:
                self._buffers.initialise(chunk, memory, self._read_param(chunk))
        self._in_ram = self._make_units()
        self.ring: StateRing | None = None
        self._step = 1
        """-1 when the next update goes from the last share to the first."""
        flowing = [self.flowing(share) for share in self.units]
        if any(flowing):
            self.ring = StateRing(
                self,
                flowing,
                optimizer,
                memory,
                ring,
                keep_param=self._keep_param,
                turns=True,
            )
            self.ring.begin_step()

    def _make_units(self) -> list[_Unit]:
        grouped: dict[tuple[int, int], list[ChunkJob]] = {}
        for share in self.units:
            for chunk in self._chunks[share.index]:
                param = self.param_piece(chunk)
                if chunk.buffer is not None and param is not None and share.grad is not None:
                    job = ChunkJob(share.grad[chunk.start : chunk.stop], chunk.buffer, param, chunk.element_offset)
                    grouped.setdefault((share.sub_group, share.param_group), []).append(job)
        return [_Unit(*key, JobBatch(self.state_format, jobs)) for key, jobs in sorted(grouped.items())]

    # --- what the ring asks of its homes

    def flowing(self, share: Share) -> list[StateChunk]:
        """The share's chunks that are updated in the ring."""
        in_ram = share.home is not None and share.grad is not None
        return [chunk for chunk in self._chunks[share.index] if chunk.on_nvme or not in_ram]

    def param_piece(self, chunk: StateChunk) -> torch.Tensor | None:
        """The chunk's parameters in RAM; None when the share lives on the drive."""
        home = self._share(chunk).home
        return None if home is None else home[chunk.start : chunk.stop]

    def param_place(self, chunk: StateChunk) -> tuple[TensorStore, str, int]:
        """(store, name, byte offset) of the chunk's parameters where `param_piece` is None."""
        assert self._params is not None
        return self._params.store_place(self._share(chunk).ds_id, chunk.start)

    def grad_place(self, chunk: StateChunk) -> GradPlace | None:
        """Place of the chunk's gradient on the drive; None when it is in RAM."""
        share = self._share(chunk)
        if share.grad is not None:
            return None
        assert self._gradients is not None
        return self._gradients.place(share.ds_id, chunk.start)

    def _keep_param(self, chunk: StateChunk, param: torch.Tensor) -> bool:
        """Put the chunk's new parameters where its gradient was; False where that memory is not to be had."""
        loan = self._share(chunk).loan
        if loan is None:
            return False
        target = loan[chunk.start : chunk.stop]
        ctypes.memmove(target.data_ptr(), param.data_ptr(), target.nbytes)  # lets other threads run meanwhile
        return True

    # --- the update

    def update(self, hyper_of: HyperOf) -> None:
        """One AdamW step on everything; returns when every parameter may be read, states on NVMe being written behind.
        A share with a `loan` may be read there; on the drive only after `wait_written`.

        UpdateFailed, EngineError, TimeoutError: what memory and the drive hold is no longer of one step."""
        self.flush()
        gradients = {share.index: self._gradient_of(share) for share in self.units}
        in_ring = []
        if self.ring is not None:
            for share in self.units[:: self._step]:
                if flowing := self.flowing(share):
                    grad = gradients[share.index]
                    in_ring.append(self.ring.submit(share, flowing, grad, hyper_of(share.param_group)))
        in_ram = [
            self._optimizer.submit(f"sub-group {unit.sub_group}", place, unit.jobs, hyper_of(unit.param_group))
            for place, unit in enumerate(self._in_ram)
        ]
        for ticket in in_ram:
            self._optimizer.wait(ticket)
        if self.ring is not None:
            for ticket in in_ring:
                self.ring.wait(ticket)
            self.ring.turn()
            self._step = -self._step

    def _gradient_of(self, share: Share) -> torch.Tensor | None:
        """Gradient of this update, in RAM; None: on the drive. A share without one (`has_grad`) gets zeros, which
        cost a pass over its own memory in RAM, and where gradients live on the drive neither a transfer nor memory."""
        if share.has_grad:
            return share.grad
        if share.grad is None:
            assert self._gradients is not None
            return self._gradients.zeros(share.ds_id)
        if not share.is_zeroed:
            share.grad.zero_()
            share.is_zeroed = True
        return share.grad

    def wait_written(self) -> None:
        """Wait until the drive has what the last update wrote."""
        if self.ring is not None:
            self.ring.wait_written()

    def settle(self) -> None:
        """Wait until the drive has everything; before states are read or written from outside."""
        if self.ring is not None:
            self.ring.flush()

    # --- checkpoints

    def read(self, share: Share, name: StateName) -> torch.Tensor:
        """One state of a share as a new fp32 tensor [numel]. After `settle`."""
        value = torch.empty(share.numel, dtype=torch.float32)
        for chunk in self._chunks.get(share.index, ()):
            param = self.param_piece(chunk)
            if param is None:  # a moment can be read without it
                is_needed = name == "master"
                param = self._read_param(chunk) if is_needed else torch.empty(chunk.numel, dtype=share.dtype)
            value[chunk.start : chunk.stop] = self._buffers.open(chunk, name, param).read(name)
        return value

    def write(self, share: Share, values: dict[StateName, torch.Tensor]) -> None:
        """Set states of a share from fp32 tensors [numel]; its parameters follow the master. After `settle`."""
        for chunk in self._chunks.get(share.index, ()):
            param = self._read_param(chunk)
            for name in STATE_NAMES:
                if name in values:
                    piece = values[name][chunk.start : chunk.stop]
                    self._buffers.open(chunk, name, param, to_write=True).write(name, piece)
            if self.param_piece(chunk) is None:
                store, where, offset_bytes = self.param_place(chunk)
                store.submit_write(where, param, offset_bytes).wait(TIMEOUT_S)

    def flush(self) -> None:
        """After `write`: let the drive have the last of it. Before an update: forget what was read."""
        self._buffers.flush()

    def _share(self, chunk: StateChunk) -> Share:
        return self._shares[chunk.unit.index]

    def _read_param(self, chunk: StateChunk) -> torch.Tensor:
        """The chunk's parameters: its home, or a copy of what the drive has."""
        piece = self.param_piece(chunk)
        if piece is None:
            share = self._share(chunk)
            n_bytes = chunk.numel * share.dtype.itemsize
            copy = pageable(n_bytes)
            store, where, offset_bytes = self.param_place(chunk)
            store.submit_read(where, copy, offset_bytes).wait(TIMEOUT_S)
            piece = copy.view(share.dtype)
        return piece

    # --- facts and the end

    @property
    def nvme_bytes(self) -> int:
        """States that live on the drive."""
        return sum(chunk.n_bytes for chunks in self._chunks.values() for chunk in chunks if chunk.on_nvme)

    @property
    def total_bytes(self) -> int:
        return sum(chunk.n_bytes for chunks in self._chunks.values() for chunk in chunks)

    def close(self, deadline: Deadline | None = None) -> bool:
        """Start nothing more on the drive and wait for what is under way; False when it did not end."""
        deadline = deadline or Deadline()
        if self.ring is None or self.ring.close(deadline.left_s()):
            return True
        deadline.expire()
        return False
