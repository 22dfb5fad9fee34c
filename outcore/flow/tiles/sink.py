"""Place where gradients of large weights go that are multiplied tile by tile: flow hands them out and keeps none."""

from __future__ import annotations

from typing import Protocol

import torch

from outcore.flow.parts import Part
from outcore.flow.tiles.matrix import TiledMatrix


class RowSink(Protocol):
    """Gradients of the rows of an embedding."""

    def note(self, ids: torch.Tensor) -> None:
        """Note rows that are looked up."""
        ...

    def add(self, ids: torch.Tensor, grad: torch.Tensor) -> None:
        """One batch's gradient [len(ids), num_cols] of these rows."""
        ...


class TileSink(Protocol):
    """Gradients of tiles. It is told of every use, so that it knows which part of a gradient is the last."""

    counting: bool
    """Off while a chunk of tokens is recomputed: its uses have been counted."""

    def begin_forward(self, unit: Part) -> None:
        """A batch goes through the part: as many will come back."""
        ...

    def begin_backward(self, unit: Part) -> None:
        """A batch comes back."""
        ...

    def expect(self, matrix: TiledMatrix) -> None:
        """The matrix has been used once more in a forward that will be differentiated."""
        ...

    def add(self, matrix: TiledMatrix, tile: int, grad: torch.Tensor) -> None:
        """One part of a tile's gradient, [rows, num_cols]."""
        ...

    def complete(self, matrix: TiledMatrix, tile: int, grad: torch.Tensor) -> None:
        """The whole gradient of a tile, [rows, num_cols]."""
        ...

    def row_sums(self, matrix: TiledMatrix) -> RowSink:
        """For a matrix that is used as an embedding."""
        ...
