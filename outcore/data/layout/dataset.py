"""`RowDataset`: rows of token segments as micro-batches of CPU tensors. Legend: B micro-batch, T tokens of a row.

Packed rows have T = seq_length, positions restarting at 0 in every document, no attention mask; what a row has left at
its end is one more document, of padding tokens without loss. Rows that are not packed are padded on the right to the
longest of the micro-batch (a multiple of 8) with an attention mask. Reading a row reads its pieces of the array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outcore.common.quantities import round_up
from outcore.data.cache import CheckedArray, carries_loss, token_ids

if TYPE_CHECKING:  # tokens are made in processes that never need torch, which takes seconds to import
    import torch

IGNORE_INDEX = -100
"""transformers' and torch's label that carries no loss."""
PAD_MULTIPLE = 8

MicroBatch = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class RowDataset:
    """Rows over a token array. `kind`: "packed", "padded" or "seq2seq"."""

    tokens: np.ndarray | CheckedArray
    starts: np.ndarray
    lengths: np.ndarray
    row_ends: np.ndarray
    seq_length: int
    kind: str
    pad_token_id: int
    fingerprint: str
    is_text: bool = True

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.row_ends) - 1

    @property
    def total_tokens(self) -> int:
        """Tokens of all rows, padding not counted."""
        return int(self.lengths.sum())

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]; padding not counted."""
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        return np.diff(ends[self.row_ends])

    @property
    def padding_share(self) -> float:
        """Share of the rows' places (seq_length each; source and target of seq2seq) that hold no token."""
        places = len(self) * self.seq_length * (2 if self.kind == "seq2seq" else 1)
        return max(0.0, 1 - self.total_tokens / places) if places else 0.0

    def documents_of(self, row: int) -> list[np.ndarray]:
        """The row's segments, uint32 tokens with loss bits."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        segments = range(int(self.row_ends[row]), int(self.row_ends[row + 1]))
        return [
            np.asarray(self.tokens[int(self.starts[s]) : int(self.starts[s]) + int(self.lengths[s])]) for s in segments
        ]

    def batch(self, rows: Sequence[int] | np.ndarray) -> MicroBatch:
        """The rows as one micro-batch; int64 tensors on the CPU."""
        return self.batch_of([self.documents_of(int(row)) for row in rows])

    def batch_of(self, documents: list[list[np.ndarray]]) -> MicroBatch:
        """Rows given by their segments, of this or another data set of the same kind and length, as a micro-batch."""
        if self.kind == "packed":
            return self._packed(documents)
        if self.kind == "seq2seq":
            return self._seq2seq([row[0] for row in documents])
        return self._padded([row[0] for row in documents])

    def filler(self, like: MicroBatch) -> MicroBatch:
        """A micro-batch of the same shape without any loss, so that ranks that have run out stay in step."""
        return {**like, "labels": _tensor(np.full(like["labels"].shape, IGNORE_INDEX, dtype=np.int64))}

    def _packed(self, rows: list[list[np.ndarray]]) -> MicroBatch:
        shape = (len(rows), self.seq_length)
        input_ids_BT = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels_BT = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        position_ids_BT = np.zeros(shape, dtype=np.int64)
        for b, documents in enumerate(rows):
            at = 0
            for tokens in documents:
                end = at + len(tokens)
                input_ids_BT[b, at:end] = token_ids(tokens)
                labels_BT[b, at:end] = labels_of(tokens)
                position_ids_BT[b, at:end] = np.arange(len(tokens))
                at = end
            position_ids_BT[b, at:] = np.arange(self.seq_length - at)
        return {
            "input_ids": _tensor(input_ids_BT),
            "labels": _tensor(labels_BT),
            "position_ids": _tensor(position_ids_BT),
        }

    def _padded(self, rows: list[np.ndarray]) -> MicroBatch:
        longest = min(self.seq_length, round_up(max(len(tokens) for tokens in rows), PAD_MULTIPLE))
        batch: MicroBatch = {
            "input_ids": _right_padded([token_ids(tokens) for tokens in rows], longest, self.pad_token_id),
            "labels": _right_padded([labels_of(tokens) for tokens in rows], longest, IGNORE_INDEX),
        }
        if any(len(tokens) < longest for tokens in rows):
            batch["attention_mask"] = _right_padded([np.ones(len(tokens), np.int64) for tokens in rows], longest, 0)
        return batch

    def _seq2seq(self, rows: list[np.ndarray]) -> MicroBatch:
        pairs = [self._source_and_target(tokens) for tokens in rows]
        longest = [
            min(self.seq_length, round_up(max(len(pair[side]) for pair in pairs), PAD_MULTIPLE)) for side in (0, 1)
        ]
        return {
            "input_ids": _right_padded([source for source, _ in pairs], longest[0], self.pad_token_id),
            "attention_mask": _right_padded([np.ones(len(source), np.int64) for source, _ in pairs], longest[0], 0),
            "labels": _right_padded([target for _, target in pairs], longest[1], IGNORE_INDEX),
        }

    def _source_and_target(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and completion; of plain text the first half of the window and the second."""
        ids = token_ids(tokens)
        middle = -(-len(ids) // 2) if self.is_text else int(np.argmax(carries_loss(tokens)))
        return ids[:middle][: self.seq_length], ids[middle:][: self.seq_length]


def labels_of(tokens: np.ndarray) -> np.ndarray:
    """Labels of one document, not shifted: the token itself, -100 where it carries no loss and at the first token."""
    labels = np.where(carries_loss(tokens), token_ids(tokens), IGNORE_INDEX)
    labels[:1] = IGNORE_INDEX
    return labels


def _right_padded(rows: list[np.ndarray], width: int, value: int) -> torch.Tensor:
    padded = np.full((len(rows), width), value, dtype=np.int64)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = row
    return _tensor(padded)


def _tensor(values: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(values)
