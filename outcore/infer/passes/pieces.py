"""A layer that the CPU computes for the GPU: graphs of what the device does, with the CPU's products between them."""

from __future__ import annotations

from collections.abc import Callable

from outcore.flow.layers import GraphPool
from outcore.flow.weights import InPlaceProducts


class LayerInPieces:
    """Runs a function whose products the CPU computes, and keeps it to be run again without its code: every tensor has
    one address for good. RuntimeError where it cannot be captured; then nothing of it counts."""

    def __init__(self, function: Callable[[], None], products: InPlaceProducts, pool: GraphPool) -> None:
        self._steps: list[Callable[[], None]] = []
        assert products.recorder is None
        with pool.pieces() as pieces:

            def take(step: Callable[[], None]) -> None:
                self._ran(pieces.end().replay)
                self._ran(step)
                pieces.begin()

            products.recorder = take
            try:
                pieces.begin()
                function()
                self._ran(pieces.end().replay)
            finally:
                products.recorder = None

    def _ran(self, step: Callable[[], None]) -> None:
        step()
        self._steps.append(step)

    def replay(self) -> None:
        """Run it once more."""
        for step in self._steps:
            step()
