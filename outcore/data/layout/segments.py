"""The layout: which tokens of the cache make up which row, for training and for evaluation.

Documents are split into training and evaluation (by a permutation of the documents; the tail of the windows when there
are fewer documents than a share of them makes sense for), cut into segments, and the segments packed into rows or given
a row each. Text longer than a row is cut into windows that lose no token. A conversation or completion is cut off at
the row's end instead, since its later windows would lack their prompt, unless `long_rows` says otherwise; it is dropped
(counted) when no loss is left.

Best-fit-decreasing packing of segments into rows of a fixed capacity.

Within a buffer of segments, longest first, each goes where it leaves the least space. Finding that row is a bisection
over the spaces that occur: about 1 us a segment. A buffer of 65,536 segments keeps memory bounded; its unfilled rows
are closed with it, which costs less than a part in a thousand."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from outcore.data.cache import CheckedArray, carries_loss
from outcore.data.layout.permutation import Permutation

BUFFER_SEGMENTS = 65536


def pack(lengths: np.ndarray, capacity: int, buffer_segments: int = BUFFER_SEGMENTS) -> tuple[np.ndarray, np.ndarray]:
    """Distributes segments over rows.

    `lengths` [segments], each from 1 to `capacity`. Returns (`order` int64 [segments]: segment numbers row after row,
    `row_ends` int64 [rows + 1]: row r is order[row_ends[r]:row_ends[r + 1]]). Every segment is in exactly one row, and
    no row exceeds the capacity. Deterministic; ties go to the earlier segment. ValueError for a length out of range."""
    if len(lengths) and (int(lengths.min()) < 1 or int(lengths.max()) > capacity):
        raise ValueError(f"segments must have 1 to {capacity} tokens, got {int(lengths.min())} to {int(lengths.max())}")
    order: list[int] = []
    row_ends: list[int] = [0]
    for start in range(0, len(lengths), buffer_segments):
        for row in _pack_buffer(lengths[start : start + buffer_segments], capacity):
            order.extend(start + segment for segment in row)
            row_ends.append(len(order))
    return np.asarray(order, dtype=np.int64), np.asarray(row_ends, dtype=np.int64)


def _pack_buffer(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    spaces: list[int] = []  # distinct spaces left, ascending
    rows_with: dict[int, list[int]] = {}  # space -> rows that have it
    for segment in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        length = int(lengths[segment])
        at = bisect_left(spaces, length)
        if at == len(spaces):
            row, space = len(rows), capacity
            rows.append([segment])
        else:
            space = spaces[at]
            row = rows_with[space].pop()
            if not rows_with[space]:
                del rows_with[space], spaces[at]
            rows[row].append(segment)
        if left := space - length:
            if left not in rows_with:
                rows_with[left] = []
                insort(spaces, left)
            rows_with[left].append(row)
    return rows


LAYOUT_VERSION = 3


class Documents(Protocol):
    """Protocol of a token cache, as far as the layout reads it."""

    @property
    def tokens(self) -> np.ndarray | CheckedArray: ...
    @property
    def offsets(self) -> np.ndarray: ...
    @property
    def first_loss(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Segments:
    """Pieces of the token array that stay together: absolute `starts` and `lengths`, and what was left out."""

    starts: np.ndarray
    lengths: np.ndarray
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    """Documents of which windows were made."""

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, chosen: Any) -> Segments:
        return replace(self, starts=self.starts[chosen], lengths=self.lengths[chosen])


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
    predicted from, so it takes the last token of the window before it along."""
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
    cache: Documents, documents: np.ndarray, seq_length: int, long_rows: str = "keep_start"
) -> Segments:
    """A conversation or completion a segment; one longer than `seq_length` as `long_rows` says.

    keep_start and keep_end cut it off, drop leaves it out, split makes windows of it. What is left without loss is
    left out and counted as dropped."""
    starts, lengths = cache.offsets[documents], cache.offsets[documents + 1] - cache.offsets[documents]
    is_long = lengths > seq_length
    if long_rows == "drop":
        kept = ~is_long
        return Segments(starts[kept], lengths[kept], dropped=int(is_long.sum()))
    if long_rows == "split":
        windows = text_windows(cache.offsets, documents, seq_length)
        kept = _with_loss(cache.tokens, windows, only=windows.lengths >= 0)
        return replace(windows.take(kept), truncated=0, dropped=int((~kept).sum()), split=int(is_long.sum()))
    cut = np.minimum(lengths, seq_length)
    if long_rows == "keep_end":
        ends = Segments(starts + lengths - cut, cut)
        kept = _with_loss(cache.tokens, ends, only=is_long)
    else:
        ends = Segments(starts, cut)
        kept = cache.first_loss[documents] < cut
    return replace(ends.take(kept), truncated=int((is_long & kept).sum()), dropped=int((~kept).sum()))


def _with_loss(tokens: np.ndarray | CheckedArray, segments: Segments, only: np.ndarray) -> np.ndarray:
    """True for segments that have a token to learn behind their first one; those not in `only` are known to have."""
    kept = np.ones(len(segments), dtype=bool)
    for i in np.flatnonzero(only):
        start = int(segments.starts[i])
        kept[i] = bool(carries_loss(np.asarray(tokens[start + 1 : start + int(segments.lengths[i])])).any())
    return kept


def merged(some: Segments, others: Segments) -> Segments:
    """Both, in the order of the token array."""
    starts = np.concatenate([some.starts, others.starts])
    order = np.argsort(starts, kind="stable")
    lengths = np.concatenate([some.lengths, others.lengths])
    return Segments(
        starts[order],
        lengths[order],
        truncated=some.truncated + others.truncated,
        dropped=some.dropped + others.dropped,
        split=some.split + others.split,
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
