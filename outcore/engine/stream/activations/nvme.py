"""Activation checkpoints in a scratch store on NVMe, behind the interface of `activations`.

The writes run behind the forward: a checkpoint's device memory is free when its last byte is written, so at most
`BEHIND_LAYERS` layers' may be on their way before the forward waits for the drive. The store is kept and used again; it
is made anew when a pass needs a larger one, so its space is reserved before the pass begins (`reserve`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from outcore.common.deadline import Deadline
from outcore.common.quantities import round_up
from outcore.engine.base import EngineError
from outcore.engine.stream.activations.memory import DeviceActivations
from outcore.flow.weights import Scratch, settle
from outcore.sizing.streaming import STAY_LAYERS
from outcore.staging import DownloadLane, LaneTransfer, UploadLane
from outcore.staging.pool import ALIGNMENT_BYTES
from outcore.storage import TensorSpec, TensorStore

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
