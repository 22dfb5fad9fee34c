"""Gradients of an embedding too large for the device: only the rows whose tokens occur, summed in RAM in fp32.

A step's rows are known once every micro-batch has been looked up. With tied weights the head's gradient of the same
matrix goes down tile by tile before; its part of these rows is kept here in fp32, unrounded, until the embedding's is
added, so that each value is rounded once, as it is when everything is added up on the device. Cost: 4 B x rows that
occur x hidden size of RAM, instead of 4 B x vocabulary x hidden size of device memory.
"""

from __future__ import annotations

import torch


class RowSums:
    """Sums of one matrix in one step. Ids are int64 on the CPU, unique within a call."""

    def __init__(self, num_cols: int) -> None:
        self.num_cols = num_cols
        self._seen: list[torch.Tensor] = []
        self._open = True
        self._ids: torch.Tensor | None = None
        self._sums = torch.zeros((0, num_cols))

    def begin(self) -> None:
        """Start a step."""
        self._seen, self._ids, self._open = [], None, True

    def note(self, ids: torch.Tensor) -> None:
        """Note rows that are looked up; in a step before its first gradient, that is to be taken note of."""
        if self._open:
            self._seen.append(ids)

    @property
    def ids(self) -> torch.Tensor:
        """All rows looked up, ascending; no more may be noted from now on."""
        if self._ids is None:
            self._ids = torch.cat(self._seen).unique() if self._seen else torch.zeros(0, dtype=torch.long)
            self._sums = torch.zeros((len(self._ids), self.num_cols))
            self._open = False
        return self._ids

    def take_from(self, rows: tuple[int, int], grad: torch.Tensor, rounded: torch.Tensor) -> None:
        """Add the noted rows among [first, last) of the head's `grad` here, and clear them in `rounded`."""
        first, last = rows
        low, high = torch.searchsorted(self.ids, torch.tensor([first, last])).tolist()
        if low == high:
            return
        inside = (self.ids[low:high] - first).to(grad.device)
        self._sums[low:high] += grad[inside].float().cpu()
        rounded[inside] = 0

    def add(self, ids: torch.Tensor, grad: torch.Tensor) -> None:
        """Add a micro-batch's gradient [len(ids), num_cols] of these rows."""
        places = torch.searchsorted(self.ids, ids)
        self._sums.index_add_(0, places, grad.float().cpu())

    def write(self, home: torch.Tensor) -> torch.Tensor:
        """Round the sums into the rows of `home`, which is zero there; they are also returned, rounded."""
        rounded = self._sums[: len(self.ids)].to(home.dtype)
        home[self.ids] = rounded
        return rounded
