"""The layout: which tokens of the cache make up which row, for training and for evaluation.

Documents are split into training and evaluation (by a permutation of the documents; the tail of the windows when there
are fewer documents than a share of them makes sense for), cut into segments, and the segments packed into rows or given
a row each. Text longer than a row is cut into windows that lose no token; a conversation or completion is cut off at
the row's end instead, since its later windows would lack their prompt, and dropped (counted) when no loss is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outcore.data.layout.packing import pack
from outcore.data.layout.permutation import Permutation

LAYOUT_VERSION = 1


@dataclass(frozen=True)
class Segments:
    """Pieces of the token array that stay together: absolute `starts` and `lengths`, and what was left out."""

    starts: np.ndarray
    lengths: np.ndarray
    truncated: int = 0
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, chosen: Any) -> Segments:
        return Segments(self.starts[chosen], self.lengths[chosen], self.truncated, self.dropped)


def split_documents(documents: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training documents, evaluation documents), both in document order; disjoint, together all of them."""
    wanted = int(documents * fraction)
    everyone = np.arange(documents, dtype=np.int64)
    if wanted == 0:
        return everyone, everyone[:0]
    is_eval = np.zeros(documents, dtype=bool)
    is_eval[Permutation(documents, seed)(np.arange(wanted))] = True
    return everyone[~is_eval], everyone[is_eval]


def text_windows(offsets: np.ndarray, documents: np.ndarray, window: int) -> Segments:
    """Consecutive windows of each document.

    All are `window` tokens long but the document's last. A single token left over would have nothing before it to be
    predicted from, so it takes the last token of the window before it along.
    """
    starts, ends = offsets[documents], offsets[documents + 1]
    counts = -(-(ends - starts) // window)
    first = np.cumsum(counts) - counts
    number = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(first, counts)
    window_starts = np.repeat(starts, counts) + number * window
    window_ends = np.minimum(window_starts + window, np.repeat(ends, counts))
    lone = np.flatnonzero((window_ends - window_starts == 1) & (number > 0))
    window_starts[lone] -= 1
    window_ends[lone - 1] -= 1
    return Segments(window_starts, (window_ends - window_starts).astype(np.int64))


def supervised_segments(
    offsets: np.ndarray, first_loss: np.ndarray, documents: np.ndarray, seq_length: int
) -> Segments:
    """One segment a document, cut off at `seq_length`; documents whose loss begins behind the cut are dropped."""
    starts, lengths = offsets[documents], offsets[documents + 1] - offsets[documents]
    kept = first_loss[documents] < np.minimum(lengths, seq_length)
    return Segments(
        starts[kept],
        np.minimum(lengths, seq_length)[kept],
        truncated=int(((lengths > seq_length) & kept).sum()),
        dropped=int((~kept).sum()),
    )


def seq2seq_segments(offsets: np.ndarray, first_loss: np.ndarray, documents: np.ndarray, seq_length: int) -> Segments:
    """One whole document a segment; source and target are cut to `seq_length` each when a batch is made."""
    starts, lengths = offsets[documents], offsets[documents + 1] - offsets[documents]
    source = first_loss[documents]
    return Segments(starts, lengths, truncated=int(((source > seq_length) | (lengths - source > seq_length)).sum()))


def rows_of(segments: Segments, seq_length: int, packed: bool) -> tuple[Segments, np.ndarray]:
    """(segments row after row, row ends [rows + 1])."""
    if not packed:
        return segments, np.arange(len(segments) + 1, dtype=np.int64)
    order, row_ends = pack(segments.lengths, seq_length)
    return segments.take(order), row_ends


def choose_rows(segments: Segments, row_ends: np.ndarray, rows: int | None, seed: int) -> tuple[Segments, np.ndarray]:
    """At most `rows` rows, chosen by the seed and kept in order."""
    total = len(row_ends) - 1
    if rows is None or total <= rows:
        return segments, row_ends
    chosen = np.sort(Permutation(total, seed, epoch=1)(np.arange(rows)))
    counts = row_ends[chosen + 1] - row_ends[chosen]
    picked = np.concatenate([np.arange(int(row_ends[row]), int(row_ends[row + 1])) for row in chosen])
    return segments.take(picked), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
