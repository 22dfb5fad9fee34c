"""Slots of the state ring: what of a chunk lies in one, and which transfers bring it there and back.

A slot holds a chunk's states when they live on NVMe and its parameter piece when the unit's slab does: the piece is
read only where the format needs it (split: the parameter is the master's upper half) and always written back. Where
gradients live on NVMe (DeepSpeed's engine, if asked for) it takes the chunk's gradient too, which is only read."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from outcore.common.quantities import format_gib, format_s, round_up
from outcore.optim import ChunkState
from outcore.optim.formats import CHUNK_BYTES, tail_of
from outcore.sizing.ring import LEAST_MATRICES, needed_in_slot, slot_count
from outcore.staging.pool import ALIGNMENT_BYTES, HostMemory
from outcore.states.placement import ChunkHomes, GradPlace, StateChunk, check_tail
from outcore.storage import TensorStore, Transfer

logger = logging.getLogger(__name__)

PRIORITY = 1
"""Behind what the lanes ask of the drive: weights and checkpoints are waited for sooner than states."""


class Stretch(NamedTuple):
    """A piece of a chunk and its place on the drive."""

    store: TensorStore
    name: str
    offset_bytes: int
    memory: torch.Tensor

    def submit_read(self) -> Transfer:
        return self.store.submit_read(self.name, self.memory, self.offset_bytes, priority=PRIORITY)

    def submit_write(self) -> Transfer:
        return self.store.submit_write(self.name, self.memory, self.offset_bytes, priority=PRIORITY)


class RingSlot:
    """Memory of `n_bytes`, page-aligned, that takes one chunk at a time."""

    def __init__(self, homes: ChunkHomes, memory: torch.Tensor) -> None:
        self._homes, self._memory = homes, memory
        self.n_bytes = memory.numel()

    def states(self, chunk: StateChunk) -> torch.Tensor:
        """uint8 [chunk.n_bytes]: where the optimizer finds the chunk's states."""
        return self._memory[: chunk.n_bytes] if chunk.buffer is None else chunk.buffer

    def param(self, chunk: StateChunk) -> torch.Tensor:
        """[chunk.numel] of the parameters' type."""
        piece = self._homes.param_piece(chunk)
        if piece is not None:
            return piece
        start = round_up(chunk.n_bytes, ALIGNMENT_BYTES) if chunk.buffer is None else 0
        return self._memory[start : start + _param_bytes(chunk)].view(chunk.unit.dtype)

    def holds_param(self, chunk: StateChunk) -> bool:
        return self._homes.param_piece(chunk) is None

    def gradient(self, chunk: StateChunk) -> torch.Tensor:
        """[chunk.numel] of the gradients' type, once `gradient_reads` are over."""
        place = self._homes.grad_place(chunk)
        assert place is not None
        return self._gradient_blocks(chunk, place)[: chunk.numel * place.dtype.itemsize].view(place.dtype)

    def gradient_reads(self, chunk: StateChunk) -> list[Stretch]:
        """Reads that bring the chunk's gradient; empty where it is in RAM."""
        place = self._homes.grad_place(chunk)
        if place is None:
            return []
        return [Stretch(place.store, place.name, place.offset_bytes, self._gradient_blocks(chunk, place))]

    def _gradient_blocks(self, chunk: StateChunk, place: GradPlace) -> torch.Tensor:
        start = round_up(chunk.n_bytes, ALIGNMENT_BYTES) if chunk.buffer is None else 0
        start += round_up(_param_bytes(chunk), ALIGNMENT_BYTES) if self.holds_param(chunk) else 0
        return self._memory[start : start + _gradient_bytes(chunk, place)]

    def reads(self, chunk: StateChunk) -> list[Stretch]:
        """Reads that an update needs besides the gradient. Without a split the parameter follows from the master and is
        only written."""
        return self._state_parts(chunk) + (self._param_part(chunk) if chunk.state_format.split_master else [])

    def state_writes(self, chunk: StateChunk) -> list[Stretch]:
        """Writes of the states that an update changed."""
        return self._state_parts(chunk)

    def check_states(self, chunk: StateChunk) -> None:
        """After `reads`: EngineError where the head of compressed states is not the one that was written."""
        if chunk.state_format.compressed:
            check_tail(chunk, self.states(chunk))

    def updated(self, chunk: StateChunk) -> None:
        """An update of it is over: from now on this much of its tail is to be moved."""
        if chunk.state_format.compressed:
            chunk.tail = tail_of(chunk.state_format, self.states(chunk), chunk.numel)

    def param_writes(self, chunk: StateChunk) -> list[Stretch]:
        """Writes of the parameters that an update changed."""
        return self._param_part(chunk)

    def initialise(self, chunk: StateChunk, timeout_s: float) -> Transfer:
        """Write fresh states of a chunk to NVMe; returns the write in flight."""
        for part in self._param_part(chunk):
            part.submit_read().wait(timeout_s)
        ChunkState(chunk.state_format, self.states(chunk), chunk.numel, self.param(chunk)).initialise()
        (part,) = self._state_parts(chunk)
        return part.submit_write()

    def _state_parts(self, chunk: StateChunk) -> list[Stretch]:
        if chunk.buffer is not None:
            return []
        assert self._homes.state_store is not None
        return [Stretch(self._homes.state_store, chunk.name, at, memory) for at, memory in pieces(chunk, self._memory)]

    def _param_part(self, chunk: StateChunk) -> list[Stretch]:
        return [Stretch(*self._homes.param_place(chunk), self.param(chunk))] if self.holds_param(chunk) else []


def pieces(chunk: StateChunk, memory: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Tuples of (offset on the drive, where the bytes belong in `memory`) for the pieces of a chunk that the drive
    holds. `memory`: [>= chunk.n_bytes]."""
    found = [(0, memory[: chunk.moved_bytes])]
    if chunk.tail is not None and chunk.tail.size_bytes:
        start = chunk.tail.offset_bytes
        found.append((chunk.moved_bytes, memory[start : start + round_up(chunk.tail.size_bytes, CHUNK_BYTES)]))
    return found


def needed_bytes(homes: ChunkHomes, chunk: StateChunk) -> int:
    """Bytes of a slot that a chunk takes."""
    place = homes.grad_place(chunk)
    return needed_in_slot(
        chunk.n_bytes if chunk.buffer is None else 0,
        _param_bytes(chunk) if homes.param_piece(chunk) is None else 0,
        _gradient_bytes(chunk, place) if place is not None else 0,
    )


def ring_slots(
    homes: ChunkHomes, chunks: Sequence[StateChunk], memory: HostMemory, ring_bytes: int, max_slots: int
) -> list[RingSlot]:
    """Take memory for slots, as many as `slot_count` says, each for any of `chunks`. ValueError for too few. Two
    matrices, which no setting makes smaller, always fit."""
    needs_bytes = [needed_bytes(homes, chunk) for chunk in chunks]
    slot_bytes = round_up(max(needs_bytes), ALIGNMENT_BYTES)
    if any(chunk.matrix is not None for chunk in chunks):
        ring_bytes = max(ring_bytes, LEAST_MATRICES * slot_bytes)
    count = slot_count(len(chunks), sum(needs_bytes), slot_bytes, ring_bytes, max_slots)
    if count < 1:
        raise ValueError(
            f"state_ring_bytes {format_gib(ring_bytes)} cannot hold one chunk of states ({format_gib(slot_bytes)}): "
            "raise it (ten and more slots keep a drive busy), or lower chunk_numel"
        )
    return [RingSlot(homes, memory.take(slot_bytes, "ring of optimizer states")) for _ in range(count)]


def initialise_states(slots: Sequence[RingSlot], chunks: Sequence[StateChunk], timeout_s: float) -> None:
    """Write the states that training starts from to NVMe, through all slots in turn. TimeoutError, OSError."""
    begin_s = time.perf_counter()
    busy: list[Transfer | None] = [None] * len(slots)
    for number, chunk in enumerate(chunks):
        if not chunk.on_nvme:
            continue
        slot, before = slots[number % len(slots)], busy[number % len(slots)]
        if before is not None:
            before.wait(timeout_s)
        busy[number % len(slots)] = slot.initialise(chunk, timeout_s)
    for transfer in busy:
        if transfer is not None:
            transfer.wait(timeout_s)
    logger.info("states on NVMe written in %s", format_s(time.perf_counter() - begin_s))


def _param_bytes(chunk: StateChunk) -> int:
    return chunk.numel * chunk.unit.dtype.itemsize


def _gradient_bytes(chunk: StateChunk, place: GradPlace) -> int:
    return round_up(chunk.numel * place.dtype.itemsize, ALIGNMENT_BYTES)
