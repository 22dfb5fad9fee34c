"""Idle memory of the device for layers that stay there, with gradients and optimizer states; how many they are is of
`sizing.training`.

The first layers stay: the next forward needs them first, and with clipping it waits for the updates on the CPU, which
become fewer. Each needs its weights (they come up no more), its gradient as long as that waits for the global norm, its
states, and what graphs keep for a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.common.quantities import MIB

RESIDENT_BYTES: int | None = None
"""Memory for layers that stay, at most, where nobody says; None: all that is idle, where steps wait for updates or
uploads. Measured (H100, cap 6.5 GiB, 1.2 B, 16,384 tokens, clipping, fp32 states, four runs): 0.50-0.54 s a step
without, 0.45-0.49 with all that is idle."""
LEAST_GAIN = 0.03
"""Share of a step that layers which stay, or updates ahead of the norm, must spare by the forecast: less is not worth
the memory."""
MOVING_PERCENT = 110
"""Memory that comes and goes within a step counts so much: the allocator does not fit all of it without gaps."""
SPARE_BYTES = 128 * MIB
"""Left alone beside it. Measured (H100, cap 6.5 GiB, 1.2 B, 16,384 tokens, split states, 4 GiB for updates ahead of the
norm): with 256 MiB one layer fewer stays, and a step takes 9 ms more."""
OTHERS_BYTES = 512 * MIB
"""Memory that the driver has free and other programs are left: a desktop takes more at times."""


@dataclass(frozen=True)
class DeviceUse:
    """Memory of the device as its allocator counts it, in bytes."""

    limit: int
    """What this process may take at most."""
    reserved: int
    """Held between steps, the allocator's gaps with it."""
    moving: int
    """Comes and goes within a step or an evaluation."""

    @property
    def idle(self) -> int:
        """What no step needs; below 0 where memory is short."""
        return self.limit - SPARE_BYTES - self.reserved - self.moving * MOVING_PERCENT // 100


def gain_of_staying(share: float, waits_s: float, bound_s: float, step_s: float) -> float:
    """Share of a step of `step_s` seconds that it spares to have `share` of the trained parameters stay: their part of
    the passes that wait for updates and uploads (`bound_s`), but no more than is waited (`waits_s`)."""
    return min(waits_s, share * bound_s) / step_s
