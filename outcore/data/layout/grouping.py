"""Rows of about the same length together, as transformers' `group_by_length` puts them: less padding, still shuffled.

An epoch's random order is cut into pieces of up to 50 batches; each is sorted, longest first, and the longest row of
all comes first, so that what needs too much memory fails in the first step (`get_length_grouped_indices`).
"""

from __future__ import annotations

import numpy as np

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
