"""Transfers of a visit to RAM: hidden states until the backward, where the device has no room, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from outcore.hf.rows import Grads
from outcore.staging import LaneTransfer

if TYPE_CHECKING:
    from outcore.hf.ground import Ground


class HiddenHome:
    """One layer's input in RAM: sent down when made, brought up by `fetch`, perhaps ahead of `take`."""

    def __init__(self, hidden: torch.Tensor, ground: Ground) -> None:
        hidden = hidden.detach().contiguous()
        self._ground, self._shape, self._dtype = ground, hidden.shape, hidden.dtype
        self._room = ground.take_room(hidden.nbytes)
        self._ram = self._room[: hidden.nbytes]
        self._going = ground.send_down(hidden, self._ram, "hidden states")
        self._coming: tuple[torch.Tensor, LaneTransfer] | None = None

    def fetch(self) -> None:
        """Have it on the device soon."""
        if self._coming is None:
            self._going.wait()
            out = torch.empty(self._shape, dtype=self._dtype, device=self._ground.device)
            self._coming = out, self._ground.upload.submit_host(self._ram, out, label="hidden states", aside=True)

    def take(self) -> torch.Tensor:
        """The hidden states on the device; they stay in RAM for another backward as long as the graph lives."""
        self.fetch()
        assert self._coming is not None
        (hidden, transfer), self._coming = self._coming, None
        transfer.wait_stream()
        return hidden

    def __del__(self) -> None:
        if self._going.done() and (self._coming is None or self._coming[1].done()):
            self._ground.give_room(self._room)


class Shipment:
    """Gradients of one layer's trained parameters on their way from the device to RAM."""

    def __init__(self, ground: Ground, name: str, trained: Sequence[torch.nn.Parameter]) -> None:
        self._ground, self._name, self._trained = ground, name, trained
        self._sent: tuple[Grads, list[LaneTransfer]] = [], []

    def send(self, gradients: Grads) -> None:
        """Send gradients in the order of the parameters, those of one type as one stretch."""
        transfers = list[LaneTransfer]()
        in_ram: Grads = [None] * len(gradients)
        by_type: dict[torch.dtype, list[int]] = {}
        for at, gradient in enumerate(gradients):
            if gradient is not None:
                by_type.setdefault(gradient.dtype, []).append(at)
        for dtype, places in by_type.items():
            flat = torch.cat([gradients[at].reshape(-1) for at in places])  # type: ignore[union-attr]
            home = self._ground.gradients.take(flat.nbytes).view(dtype)
            transfers.append(self._ground.send_down(flat, home, f"gradients of {self._name}"))
            sizes = [self._trained[at].numel() for at in places]
            for at, part in zip(places, home.split(sizes), strict=True):
                in_ram[at] = part.view(self._trained[at].shape)
        self._sent = in_ram, transfers

    def take(self) -> Grads:
        """The gradients, arrived; None for a parameter that has none."""
        (gradients, transfers), self._sent = self._sent, ([], [])
        for transfer in transfers:
            transfer.wait()
        return gradients or [None] * len(self._trained)
