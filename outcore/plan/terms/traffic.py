"""What a step moves and computes: counted without a rate. `Rates` turns it into seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """One way through the model, forward, backward or the update, on one GPU; bytes by direction."""

    flops: float = 0.0
    """Matrix products."""
    attention_flops: float = 0.0
    device_bytes: float = 0.0
    """Through the device's own memory, beside the operands of matrix products."""
    launched_layers: float = 0.0
    """Eager layers' worth of launches by the host."""
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    read_bytes: float = 0.0
    """From the drive."""
    written_bytes: float = 0.0
    copied_bytes: float = 0.0
    """Copies through RAM beside an update's own."""
    updated_params: float = 0.0
    """Parameters that the CPU updates meanwhile."""
    ram_bytes: float = 0.0
    """An update's at the plain rate of RAM, where no measured one applies."""
    awaited_read_bytes: float | None = None
    """Weights from the drive that layers wait for, and for the link: nothing comes ahead of its use. None: it does."""


@dataclass(frozen=True)
class Traffic:
    """A step, pass by pass."""

    passes: tuple[Pass, ...]
    are_apart: bool = True
    """Whether each pass waits for the one before. Otherwise they overlap as if they were one."""
    between_layers: float = 0.0
    """Eager layers' worth of launches that no work of the GPU hides."""

    def sum(self, of: Callable[[Pass], float]) -> float:
        """Total of one figure."""
        return sum(of(one) for one in self.passes)

    @property
    def read_bytes(self) -> float:
        """All that the drive reads in a step."""
        return self.sum(lambda one: one.read_bytes)

    @property
    def written_bytes(self) -> float:
        """All that the drive writes in a step."""
        return self.sum(lambda one: one.written_bytes)
