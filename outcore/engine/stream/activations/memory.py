"""Homes of activation checkpoints (the layers' inputs) wait between forward and backward: on the device, in RAM, on
NVMe.

Off the device each goes down through the download lane after its layer's forward and comes up again one layer ahead of
its backward; the last layers' stay on the device, because they are needed at once. Host buffers are kept and used
again. `activations_nvme` is the kind on NVMe. Bytes: layers x micro-batches x [B, T, H], each way, per step.

Activation checkpoints in a scratch store on NVMe, behind the interface of `activations`.

The writes run behind the forward: a checkpoint's device memory is free when its last byte is written, so at most
`BEHIND_LAYERS` layers' may be on their way before the forward waits for the drive. The store is kept and used again; it
is made anew when a pass needs a larger one, so its space is reserved before the pass begins (`reserve`).

The home in which a run's activation checkpoints wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from outcore.common.deadline import Deadline
from outcore.common.quantities import round_up
from outcore.engine.base import EngineError
from outcore.engine.stream.blueprint import Blueprint
from outcore.engine.stream.gradients.arena import GradientArena
from outcore.flow.parts import ModelParts
from outcore.flow.weights import Scratch, settle
from outcore.sizing.streaming import STAY_LAYERS, lent_bytes
from outcore.staging import DownloadLane, LaneTransfer, UploadLane
from outcore.staging.pool import ALIGNMENT_BYTES, HostMemory
from outcore.storage import TensorSpec, TensorStore

DEVICE_STACKS = 2
"""Buffers on the device for a layer's checkpoints on their way: one gathered or used while the other is copied."""


class Activations(Protocol):
    """Checkpoints by (layer, micro-batch)."""

    def link(self, layer: int, micro_batch: int = 0) -> Literal["pcie", "nvme"] | None:
        """Resource that `keep`, `take` or (of micro-batch 0) `prefetch` may have to wait for; None when they do not."""
        ...

    def reserve(self, sizes_bytes: Sequence[int]) -> None:
        """The coming pass keeps a checkpoint of these sizes (one per micro-batch) for each layer. EngineError when
        there is no room for them, before any is taken."""
        ...

    def keep(self, layer: int, micro_batch: int, hidden: torch.Tensor) -> None:
        """Take a layer's input; the caller lets go of it."""
        ...

    def prefetch(self, layer: int) -> None:
        """Have the checkpoints of this layer (perhaps below 0: none) on the device soon."""
        ...

    def take(self, layer: int, micro_batch: int) -> torch.Tensor:
        """Give it back, once."""
        ...

    def clear(self, deadline: Deadline | None = None) -> None:
        """Forget everything after a failed pass, once the copies in flight have ended."""
        ...


class DeviceActivations:
    """Activations that stay where they are: on the device, or those of long rows in RAM. `expect`: told what is taken
    soon."""

    def __init__(self, expect: Callable[[torch.Tensor], object] = lambda hidden: None) -> None:
        self._kept: dict[tuple[int, int], torch.Tensor] = {}
        self._expect = expect

    def link(self, layer: int, micro_batch: int = 0) -> None:
        return None

    def reserve(self, sizes_bytes: Sequence[int]) -> None:
        return

    def keep(self, layer: int, micro_batch: int, hidden: torch.Tensor) -> None:
        self._kept[layer, micro_batch] = hidden

    def prefetch(self, layer: int) -> None:
        if (first := self._kept.get((layer, 0))) is not None:
            self._expect(first)

    def take(self, layer: int, micro_batch: int) -> torch.Tensor:
        return self._kept.pop((layer, micro_batch))

    def clear(self, deadline: Deadline | None = None) -> None:
        self._kept.clear()


Lend = Callable[[int], torch.Tensor | None]
"""RAM (uint8, 1-D) of a layer that nobody needs between its forward and the end of its backward."""


class RamActivations:
    """Down to RAM and back, a layer's micro-batches as one transfer: each takes the host time that launches need.

    `num_layers`: of the model; the last `STAY_LAYERS` stay on the device. The others pass through
    `DEVICE_STACKS` buffers there, so that a host that runs far ahead of the device takes no more of its memory.

    `lend`: a layer's gradient home. Its old gradient is used up before the layer's forward (the update was waited for)
    and its new one comes after the checkpoint was taken back for the backward, so checkpoints lie there as far as they
    fit and cost RAM of their own only beyond it.
    """

    def __init__(
        self,
        memory: HostMemory,
        upload: UploadLane,
        download: DownloadLane,
        num_layers: int,
        lend: Lend = lambda layer: None,
    ) -> None:
        self._memory, self._upload, self._download, self._lend = memory, upload, download, lend
        self._sizes: list[int] = []
        self._offsets: list[int] = [0]
        """Offset of each micro-batch within a layer's checkpoints, and their sum."""
        self._first_staying = num_layers - STAY_LAYERS
        self._device = DeviceActivations()
        self._homes: dict[int, torch.Tensor] = {}
        """RAM of our own by layer, for checkpoints that do not fit the reused gradient memory."""
        self._forms: dict[tuple[int, int], tuple[torch.dtype, torch.Size]] = {}
        self._stacks: list[torch.Tensor] = []
        self._leaving: list[list[LaneTransfer]] = [[] for _ in range(DEVICE_STACKS)]
        """Transfers by buffer: what still reads it."""
        self._turn = 0
        self._stack: torch.Tensor | None = None
        """The buffer that a layer's checkpoints are being gathered in."""
        self._going: dict[int, list[LaneTransfer]] = {}
        self._coming: dict[int, tuple[torch.Tensor, list[LaneTransfer]]] = {}

    def link(self, layer: int, micro_batch: int = 0) -> Literal["pcie"] | None:
        goes = 0 <= layer < self._first_staying
        return "pcie" if goes and not micro_batch else None  # a layer's micro-batches are one transfer

    @property
    def host_bytes(self) -> int:
        """RAM that the checkpoints have taken so far, without reused gradient memory."""
        return sum(home.nbytes for home in self._homes.values())

    def reserve(self, sizes_bytes: Sequence[int]) -> None:
        self._sizes, self._offsets = list(sizes_bytes), [0]
        for size in sizes_bytes:
            self._offsets.append(self._offsets[-1] + round_up(size, ALIGNMENT_BYTES))

    def keep(self, layer: int, micro_batch: int, hidden: torch.Tensor) -> None:
        if layer >= self._first_staying:
            self._device.keep(layer, micro_batch, hidden)
            return
        assert hidden.nbytes == self._sizes[micro_batch], "hidden states keep their size from layer to layer"
        if self._stack is None:
            self._stack = self._next_stack()
        start = self._offsets[micro_batch]
        self._stack[start : start + hidden.nbytes].view(hidden.dtype).view(hidden.shape).copy_(hidden)
        self._forms[layer, micro_batch] = (hidden.dtype, hidden.shape)
        if micro_batch == len(self._sizes) - 1:
            self._going[layer] = [
                self._download.submit_host(self._stack[begin:end], home, label=f"activations {layer}")
                for begin, end, home in self._pieces(layer)
            ]
            self._leaving[self._turn] = self._going[layer]
            self._stack = None

    def prefetch(self, layer: int) -> None:
        if layer not in self._going:
            return
        for transfer in self._going.pop(layer):
            transfer.wait()
        stack = self._next_stack()  # what read it last has been queued: the layer above the one whose turn it is
        self._coming[layer] = (
            stack,
            [
                self._upload.submit_host(home, stack[begin:end], label=f"activations {layer}")
                for begin, end, home in self._pieces(layer)
            ],
        )

    def take(self, layer: int, micro_batch: int) -> torch.Tensor:
        if layer >= self._first_staying:
            return self._device.take(layer, micro_batch)
        self.prefetch(layer)
        stack, transfers = self._coming[layer]
        while transfers:
            transfers.pop().wait_stream()
        if micro_batch == len(self._sizes) - 1:
            del self._coming[layer]
        dtype, shape = self._forms.pop((layer, micro_batch))
        start = self._offsets[micro_batch]
        return stack[start : start + self._sizes[micro_batch]].view(dtype).view(shape)

    def clear(self, deadline: Deadline | None = None) -> None:
        self._device.clear()
        going = [transfer for transfers in self._going.values() for transfer in transfers]
        coming = [transfer for _, transfers in self._coming.values() for transfer in transfers]
        settle(going + coming, deadline)
        for held in (self._going, self._coming, self._forms):
            held.clear()
        self._leaving = [[] for _ in range(DEVICE_STACKS)]
        self._stack = None

    def _next_stack(self) -> torch.Tensor:
        """The buffer whose turn it is; work queued on the current stream from now on may write to it."""
        total = self._offsets[-1]
        if not self._stacks or len(self._stacks[0]) < total:  # transfers under way keep the old ones alive
            self._stacks = [
                torch.empty(total, dtype=torch.uint8, device=self._upload.device) for _ in range(DEVICE_STACKS)
            ]
            self._leaving = [[] for _ in range(DEVICE_STACKS)]
        self._turn = (self._turn + 1) % DEVICE_STACKS
        for transfer in self._leaving[self._turn]:
            transfer.wait_stream()
        self._leaving[self._turn] = []
        return self._stacks[self._turn][:total]

    def _pieces(self, layer: int) -> list[tuple[int, int, torch.Tensor]]:
        """(begin, end, RAM) of a layer's checkpoints. As many micro-batches as fit use the gradient memory."""
        lent, total = self._lend(layer), self._offsets[-1]
        fits = 0 if lent is None else lent_bytes(self._offsets, lent.nbytes)
        pieces = [] if lent is None or not fits else [(0, fits, lent[:fits])]
        if fits < total:
            home = self._homes.get(layer)
            if home is None or home.nbytes < total - fits:
                if home is not None:  # of an earlier step: rows are longer now
                    self._memory.give_back(self._homes.pop(layer))
                home = self._homes[layer] = self._memory.take(total - fits, f"activations of layer {layer}")
            pieces.append((fits, total, home[: total - fits]))
        return pieces


NAME = "activations"
BEHIND_LAYERS = 2
"""Layers whose checkpoints may be on their way to the drive: one being copied down, one being written."""


class NvmeActivations:
    """Checkpoints that wait on a drive."""

    def __init__(self, scratch: Scratch, upload: UploadLane, download: DownloadLane, num_layers: int) -> None:
        self._scratch, self._upload, self._download = scratch, upload, download
        self._first_staying = max(0, num_layers - STAY_LAYERS)
        self._device = DeviceActivations()
        self._store: TensorStore | None = None
        self._size_bytes = 0
        self._offsets: list[int] = []
        """Offset of each micro-batch within a layer's part of the store."""
        self._layer_bytes = 0
        self._going: dict[tuple[int, int], tuple[LaneTransfer, torch.dtype, torch.Size]] = {}
        self._coming: dict[tuple[int, int], tuple[LaneTransfer, torch.Tensor]] = {}

    def link(self, layer: int, micro_batch: int = 0) -> Literal["nvme"] | None:
        return "nvme" if 0 <= layer < self._first_staying else None

    def reserve(self, sizes_bytes: Sequence[int]) -> None:
        assert not self._going and not self._coming, "checkpoints of the pass before are still there"
        self._offsets, self._layer_bytes = [], 0
        for size in sizes_bytes:
            self._offsets.append(self._layer_bytes)
            self._layer_bytes += round_up(size, ALIGNMENT_BYTES)
        needed_bytes = self._layer_bytes * self._first_staying
        if needed_bytes > self._size_bytes:
            self._size_bytes = 0  # the old one is gone even when there is no room for the new one
            self._store = self._scratch.store(NAME, [TensorSpec(NAME, torch.uint8, (needed_bytes,))])
            self._size_bytes = needed_bytes

    def keep(self, layer: int, micro_batch: int, hidden: torch.Tensor) -> None:
        if layer >= self._first_staying:
            self._device.keep(layer, micro_batch, hidden)
            return
        for key, (transfer, *_) in self._going.items():
            if key[0] + BEHIND_LAYERS <= layer and not transfer.done():
                self._wait(key, transfer, "written")
        hidden = hidden.contiguous()
        assert self._store is not None
        flat, offset = hidden.view(-1).view(torch.uint8), self._offset(layer, micro_batch)
        transfer = self._download.submit_stored(flat, self._store, NAME, offset, label=f"activations {layer}")
        self._going[layer, micro_batch] = (transfer, hidden.dtype, hidden.shape)

    def prefetch(self, layer: int) -> None:
        for key in [key for key in self._going if key[0] == layer]:
            transfer, dtype, shape = self._going[key]
            self._wait(key, transfer, "written")
            del self._going[key]
            hidden = torch.empty(shape, dtype=dtype, device=self._upload.device)
            assert self._store is not None
            flat, offset = hidden.view(-1).view(torch.uint8), self._offset(*key)
            transfer = self._upload.submit_stored(self._store, NAME, flat, offset, label=f"activations {layer}")
            self._coming[key] = (transfer, hidden)

    def take(self, layer: int, micro_batch: int) -> torch.Tensor:
        if layer >= self._first_staying:
            return self._device.take(layer, micro_batch)
        self.prefetch(layer)
        transfer, hidden = self._coming.pop((layer, micro_batch))
        try:
            transfer.wait_stream()
        except (OSError, RuntimeError, TimeoutError) as error:
            raise _lost((layer, micro_batch), "read back", error) from error
        return hidden

    def clear(self, deadline: Deadline | None = None) -> None:
        self._device.clear()
        settle([transfer for transfer, *_ in (*self._going.values(), *self._coming.values())], deadline)
        self._going.clear()
        self._coming.clear()

    def _offset(self, layer: int, micro_batch: int) -> int:
        return layer * self._layer_bytes + self._offsets[micro_batch]

    def _wait(self, key: tuple[int, int], transfer: LaneTransfer, what: str) -> None:
        try:
            transfer.wait()
        except (OSError, RuntimeError, TimeoutError) as error:
            raise _lost(key, what, error) from error


def _lost(key: tuple[int, int], what: str, error: BaseException) -> EngineError:
    return EngineError(
        f"the activation checkpoint of layer {key[0]}, micro-batch {key[1]}, could not be {what}: {error}. The step "
        "cannot be finished; resume from the last checkpoint"
    )


def open_activations(
    plan: Blueprint,
    memory: HostMemory,
    lanes: tuple[UploadLane, DownloadLane],
    scratch: Scratch | None,
    arena: GradientArena,
    expect: Callable[[torch.Tensor], object],
) -> Activations:
    """On NVMe with the space that the settings say a step needs. Those of long rows have homes in RAM already, and
    `expect` is told which are taken soon."""
    num_layers = len(plan.units.layers)
    where = plan.settings.activations_on(plan.device)
    if plan.tile_plan.holding.tile_tokens:
        return DeviceActivations(expect)
    if where == "ram":
        lend = _lender(plan.units, arena, plan.tile_plan.indices, plan.place.rank, plan.place.world_size)
        return RamActivations(memory, *lanes, num_layers, lend=lend)
    if where == "nvme":
        assert scratch is not None
        activations = NvmeActivations(scratch, *lanes, num_layers)
        row_bytes = plan.loaded.facts.hidden_size * plan.dtype.itemsize
        activations.reserve([tokens * row_bytes for tokens in plan.settings.step_tokens or ()])
        return activations
    return DeviceActivations()


def _lender(units: ModelParts, arena: GradientArena, tiled: frozenset[int], rank: int, world_size: int) -> Lend:
    """Gradients' homes for checkpoints; a tiled layer's are written to while its checkpoints are still needed. Of homes
    that several ranks share each gets an equal piece: a sum is written there when all have used their checkpoints."""

    def lend(layer: int) -> torch.Tensor | None:
        if units.layer_units[layer].index in tiled:
            return None
        home = arena.own_home(units.layer_units[layer])
        if home is None:
            return None
        piece_bytes = home.nbytes // world_size // ALIGNMENT_BYTES * ALIGNMENT_BYTES if world_size > 1 else home.nbytes
        return home.view(torch.uint8)[rank * piece_bytes : (rank + 1) * piece_bytes]

    return lend
