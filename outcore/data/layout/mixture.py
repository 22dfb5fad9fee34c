"""`MixedRows`: the rows of several sources as one data set, some taken in part or several times over.

A weight is how often a source's rows are seen in an epoch: 1 each row once, 0.3 three tenths of them (chosen by the
seed), 2 each row twice. Row r of the mixture belongs to the source into whose share it falls; `BatchStream` shuffles
the rows of all sources together, so the mixture is as even, as repeatable and as exactly resumable as one source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from outcore.data.basis import DataError
from outcore.data.layout.dataset import MicroBatch, RowDataset
from outcore.data.layout.permutation import Permutation


@dataclass(frozen=True)
class MixedRows:
    """Rows of `parts`, which have one length and one kind, each taken by its weight."""

    parts: tuple[RowDataset, ...]
    weights: tuple[float, ...]
    seed: int = 42

    def __post_init__(self) -> None:
        kinds = {(part.kind, part.seq_length, part.is_text and part.kind == "seq2seq") for part in self.parts}
        if len(kinds) > 1:
            raise DataError("an encoder-decoder cannot be trained on plain text and on prompts with answers at once")

    @cached_property
    def taken(self) -> tuple[int, ...]:
        """Rows of an epoch by source; of each at least one."""
        pairs = zip(self.parts, self.weights, strict=True)
        return tuple(max(1, round(len(part) * weight)) if len(part) else 0 for part, weight in pairs)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.taken)

    @cached_property
    def _orders(self) -> tuple[Permutation, ...]:
        return tuple(Permutation(max(1, len(part)), self.seed + n) for n, part in enumerate(self.parts))

    def __len__(self) -> int:
        """Rows of an epoch."""
        return int(self._ends[-1])

    @property
    def kind(self) -> str:
        """Kind of each source."""
        return self.parts[0].kind

    @property
    def seq_length(self) -> int:
        """Tokens of a row."""
        return self.parts[0].seq_length

    @property
    def pad_token_id(self) -> int:
        """The token of padding."""
        return self.parts[0].pad_token_id

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the sources' content, their weights and the seed."""
        sources = [f"{part.fingerprint}*{weight:g}" for part, weight in zip(self.parts, self.weights, strict=True)]
        return f"{self.seed}:{'+'.join(sources)}"

    @property
    def tokens_by_source(self) -> tuple[float, ...]:
        """Tokens of an epoch by source."""
        return tuple(
            part.total_tokens * taken / max(1, len(part)) for part, taken in zip(self.parts, self.taken, strict=True)
        )

    @property
    def total_tokens(self) -> int:
        """Tokens of an epoch."""
        return round(sum(self.tokens_by_source))

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of each row of an epoch, int64 [rows]; padding not counted."""
        return np.concatenate(
            [
                part.row_lengths[self._places(source, np.arange(taken))]
                for source, (part, taken) in enumerate(zip(self.parts, self.taken, strict=True))
                if taken
            ]
        )

    @property
    def padding_share(self) -> float:
        """Share of the rows' places that hold no token."""
        return sum(p.padding_share * n for p, n in zip(self.parts, self.taken, strict=True)) / max(1, len(self))

    def documents_of(self, row: int) -> list[np.ndarray]:
        """The row's segments, uint32 tokens with loss bits."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        source = int(np.searchsorted(self._ends, row, side="right"))
        first = int(self._ends[source - 1]) if source else 0
        return self.parts[source].documents_of(int(self._places(source, np.asarray([row - first]))[0]))

    def _places(self, source: int, numbers: np.ndarray) -> np.ndarray:
        """Rows within a source of the numbered rows that the mixture takes of it."""
        places = numbers % len(self.parts[source])
        return places if self.weights[source] == 1 else self._orders[source](places)

    def batch(self, rows: Sequence[int] | np.ndarray) -> MicroBatch:
        """The rows as one micro-batch; int64 tensors on the CPU."""
        return self.parts[0].batch_of([self.documents_of(int(row)) for row in rows])

    def filler(self, like: MicroBatch) -> MicroBatch:
        """A micro-batch of the same shape without any loss."""
        return self.parts[0].filler(like)


Rows = RowDataset | MixedRows
