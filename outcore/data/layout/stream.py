"""`BatchStream` (endless, for training, resumable) and `EvalStream` (every row once) over a `RowDataset`.

Rows are numbered a = 0, 1, 2, ... over all epochs; number a is row permutation(seed, a // rows)[a % rows]. A global
micro-batch is the next micro_batch_size * world_size numbers, and rank r takes its r-th part. So the order knows
nothing of the number of ranks: two ranks see in one step what one rank sees in two. The last batch of an epoch is
filled up from the next epoch: no row is repeated or left out within an epoch. The state is one number and what it is
valid for. Grouped by length (`grouping`), an epoch's order also depends on the rows of a step.

Rows of about the same length together, as transformers' `group_by_length` puts them: less padding, still shuffled.

An epoch's random order is cut into pieces of up to 50 batches; each is sorted, longest first, and the longest row of
all comes first, so that what needs too much memory fails in the first step (`get_length_grouped_indices`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from outcore.data.basis import DataError
from outcore.data.layout.dataset import MicroBatch
from outcore.data.layout.mixture import Rows
from outcore.data.layout.permutation import Permutation

BATCHES_TOGETHER = 50
"""Batches of a piece that is sorted; in short data a quarter of all."""


def grouped(order: np.ndarray, lengths: np.ndarray, batch_rows: int) -> np.ndarray:
    """The rows of `order` (int64 [rows]), sorted piece by piece. `lengths`: tokens by row; `batch_rows`: of a step."""
    piece_rows = batch_rows * max(1, min(len(order) // (4 * batch_rows), BATCHES_TOGETHER))
    starts = range(0, len(order), piece_rows)
    pieces = [order[start : start + piece_rows] for start in starts]
    found = np.concatenate([piece[np.argsort(-lengths[piece], kind="stable")] for piece in pieces])
    longest = starts[int(np.argmax(lengths[found[list(starts)]]))]
    found[[0, longest]] = found[[longest, 0]]
    return found


STATE_VERSION = 1


def _check(dataset: Rows, micro_batch_size: int, rank: int, world_size: int) -> None:
    if len(dataset) == 0:
        raise DataError("the data set has no rows: nothing to iterate over")
    if micro_batch_size < 1:
        raise DataError(f"the micro-batch size must be at least 1, got {micro_batch_size}")
    if not 0 <= rank < world_size:
        raise DataError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")


class BatchStream:
    """Endless iterator over one rank's micro-batches; `state_dict` is the same on every rank and exact."""

    def __init__(
        self,
        dataset: Rows,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 42,
        shuffle: bool = True,
        group_rows: int = 0,
    ) -> None:
        """`group_rows`: rows of a step, which are to be of about the same length; 0: of any."""
        _check(dataset, micro_batch_size, rank, world_size)
        self.dataset, self.micro_batch_size = dataset, micro_batch_size
        self.rank, self.world_size = rank, world_size
        self.seed, self.shuffle, self.group_rows = seed, shuffle, group_rows
        self.rows_seen = 0
        """Rows that all ranks together have taken, over all epochs."""
        self._order: tuple[int, Callable[[np.ndarray], np.ndarray]] = (-1, Permutation(1, 0))
        """The epoch looked at last, and its rows by place."""

    @property
    def epoch(self) -> int:
        """Whole epochs done."""
        return self.rows_seen // len(self.dataset)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        batch = self.dataset.batch(self.next_rows())
        self.rows_seen += self.micro_batch_size * self.world_size
        return batch

    def next_rows(self) -> np.ndarray:
        """Row numbers of this rank's next micro-batch, int64 [micro_batch_size]; does not advance."""
        first = self.rows_seen + self.rank * self.micro_batch_size
        return self._rows(np.arange(first, first + self.micro_batch_size, dtype=np.int64))

    def _rows(self, numbers: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(numbers, len(self.dataset))
        if not self.shuffle:
            return places
        rows = np.empty_like(places)
        for epoch in np.unique(epochs):
            if self._order[0] != epoch:
                self._order = (int(epoch), self._order_of(int(epoch)))
            chosen = epochs == epoch
            rows[chosen] = self._order[1](places[chosen])
        return rows

    def _order_of(self, epoch: int) -> Callable[[np.ndarray], np.ndarray]:
        permutation = Permutation(len(self.dataset), self.seed, epoch)
        if not self.group_rows:
            return permutation
        everyone = permutation(np.arange(len(self.dataset), dtype=np.int64))
        return grouped(everyone, self.dataset.row_lengths, self.group_rows).__getitem__

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; independent of rank, number of ranks and micro-batch size."""
        return {
            "version": STATE_VERSION,
            "rows_seen": self.rows_seen,
            "rows": len(self.dataset),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "group_rows": self.group_rows,
            "fingerprint": self.dataset.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken; DataError when it belongs to other data, another order or another
        version."""
        if state.get("version") != STATE_VERSION:
            raise DataError(f"the data position was saved in version {state.get('version')!r}; this is {STATE_VERSION}")
        for key, what in (
            ("fingerprint", "the data, the tokenizer, seq_length or packing"),
            ("rows", "the data"),
            ("seed", "the seed"),
            ("shuffle", "the order"),
            ("group_rows", "the grouping by length (group_by_length, or the rows of a step)"),
        ):
            was = state.get(key, 0 if key == "group_rows" else None)  # older checkpoints grouped nothing
            if was != self.state_dict()[key]:
                raise DataError(
                    f"the data position cannot be restored: {what} changed since the checkpoint ({key} was "
                    f"{was!r}, is {self.state_dict()[key]!r}). Use the former settings and data, or start a "
                    "new run from the checkpoint's weights"
                )
        self.rows_seen = int(state["rows_seen"])


class EvalStream:
    """Finite iterator: every row exactly once over all ranks, in order, the same number of micro-batches on each rank.

    Where a rank has no row left in the last global batch, it gets a filler without loss (all labels -100); the last
    real micro-batch may be short. Can be iterated again and again."""

    def __init__(self, dataset: Rows, micro_batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        _check(dataset, micro_batch_size, rank, world_size)
        self.dataset, self.micro_batch_size = dataset, micro_batch_size
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        """Micro-batches of each rank."""
        global_rows = self.micro_batch_size * self.world_size
        return (len(self.dataset) + global_rows - 1) // global_rows

    def __iter__(self) -> Iterator[MicroBatch]:
        for number in range(len(self)):
            first = (number * self.world_size + self.rank) * self.micro_batch_size
            rows = range(first, min(first + self.micro_batch_size, len(self.dataset)))
            yield self.dataset.batch(rows) if rows else self.dataset.filler(self.dataset.batch([0]))
