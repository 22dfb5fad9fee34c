"""Hidden states that wait in RAM between a layer's forward and its backward, where the device has no room for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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
