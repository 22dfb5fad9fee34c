"""Where activation checkpoints (the layers' inputs) wait between forward and backward: on the device, or in RAM.

In RAM each goes down through the download lane after its layer's forward and comes up again one layer ahead of its
backward; the last layers' stay on the device, because they are needed at once. Host buffers are kept and used again.
Bytes: layers x micro-batches x [B, T, H], each way, per step.
"""

from __future__ import annotations

from typing import Protocol

import torch

from outcore.engine.stream.host_memory import HostMemory
from outcore.engine.stream.prefetch import settle
from outcore.staging import DownloadLane, LaneTransfer, UploadLane


class Activations(Protocol):
    """Checkpoints by (layer, micro-batch)."""

    def keep(self, layer: int, micro_batch: int, hidden: torch.Tensor) -> None:
        """Take a layer's input; the caller lets go of it."""
        ...

    def prefetch(self, layer: int) -> None:
        """Have the checkpoints of this layer (perhaps below 0: none) on the device soon."""
        ...

    def take(self, layer: int, micro_batch: int) -> torch.Tensor:
        """Give it back, once."""
        ...

    def clear(self) -> None:
        """Forget everything (after a failed pass)."""
        ...


class DeviceActivations:
    """They stay where they are."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def keep(self, layer: int, micro_batch: int, hidden: torch.Tensor) -> None:
        self._kept[layer, micro_batch] = hidden

    def prefetch(self, layer: int) -> None:
        return

    def take(self, layer: int, micro_batch: int) -> torch.Tensor:
        return self._kept.pop((layer, micro_batch))

    def clear(self) -> None:
        self._kept.clear()


class RamActivations:
    """Down to RAM and back. `num_layers`: of the model; `stay`: how many of the last ones stay on the device."""

    def __init__(
        self, memory: HostMemory, upload: UploadLane, download: DownloadLane, num_layers: int, stay: int = 2
    ) -> None:
        self._memory, self._upload, self._download = memory, upload, download
        self._first_staying = num_layers - stay
        self._device = DeviceActivations()
        self._homes: dict[tuple[int, int], torch.Tensor] = {}
        self._going: dict[tuple[int, int], tuple[LaneTransfer, torch.dtype, torch.Size]] = {}
        self._coming: dict[tuple[int, int], tuple[LaneTransfer, torch.Tensor]] = {}

    @property
    def host_bytes(self) -> int:
        """RAM that the checkpoints have taken so far."""
        return sum(home.nbytes for home in self._homes.values())

    def keep(self, layer: int, micro_batch: int, hidden: torch.Tensor) -> None:
        key = (layer, micro_batch)
        if layer >= self._first_staying:
            self._device.keep(layer, micro_batch, hidden)
            return
        hidden = hidden.contiguous()
        home = self._homes.get(key)
        if home is None or home.nbytes < hidden.nbytes:
            home = self._homes[key] = self._memory.take(hidden.nbytes, f"activations of layer {layer}")
        transfer = self._download.submit_host(hidden, home[: hidden.nbytes])
        self._going[key] = (transfer, hidden.dtype, hidden.shape)

    def prefetch(self, layer: int) -> None:
        for key in [key for key in self._going if key[0] == layer]:
            transfer, dtype, shape = self._going.pop(key)
            transfer.wait()
            hidden = torch.empty(shape, dtype=dtype, device=self._upload.device)
            self._coming[key] = (self._upload.submit_host(self._homes[key][: hidden.nbytes], hidden), hidden)

    def take(self, layer: int, micro_batch: int) -> torch.Tensor:
        if layer >= self._first_staying:
            return self._device.take(layer, micro_batch)
        self.prefetch(layer)
        transfer, hidden = self._coming.pop((layer, micro_batch))
        transfer.wait_stream()
        return hidden

    def clear(self) -> None:
        self._device.clear()
        for transfer, *_ in (*self._going.values(), *self._coming.values()):
            settle(transfer)
        self._going.clear()
        self._coming.clear()
