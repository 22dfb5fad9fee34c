"""Summary of the data: what was read, what became of it, and which share of it bears loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outcore.common.quantities import counted, format_count


@dataclass(frozen=True)
class DataSummary:
    """Counts of what was read and what became of it; `lines()` for people."""

    source: str
    shape: str
    kind: str
    seq_length: int
    documents: int
    tokens: int
    loss_tokens: int
    max_token_id: int
    """Largest of the training and evaluation data. Must be below the vocabulary size of the model."""
    train_rows: int
    train_tokens: int
    eval_rows: int
    padding_share: float
    bad_rows: int
    bad_row_examples: list[str]
    empty_documents: int
    truncated_documents: int
    dropped_documents: int
    split_documents: int
    cache_hit: bool
    cache_path: str
    long_rows: str = "keep_start"
    loss_shares: list[int] = field(default_factory=list)
    """Documents by the share of their tokens that carry loss, in tenths."""
    loss_tokens_range: dict[str, int] = field(default_factory=dict)
    """Least and most loss tokens of a document."""
    unused_columns: dict[str, int] = field(default_factory=dict)
    """Column -> rows in which it holds something that is not read."""
    notices: dict[str, int] = field(default_factory=dict)
    """Other parts of rows that are not used, or were added, in words -> in how many rows."""
    end_tokens: list[int] = field(default_factory=list)
    """Tokens that conversations, answers and rows of tokens end with."""
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        lines = [
            f"data: {self.source}: {counted(self.documents, 'document')}, {format_count(self.tokens)} tokens "
            f"({self.loss_tokens / max(1, self.tokens):.0%} carry loss), {self.shape}; "
            f"{'token cache found' if self.cache_hit else 'tokenised'} in {self.cache_path}",
            f"rows: {self.train_rows:,} to train on, {self.eval_rows:,} to evaluate, {self._room()}",
        ]
        if self.bad_rows:
            lines.append(
                f"left out: {counted(self.bad_rows, 'malformed row')}, e.g. {'; '.join(self.bad_row_examples[:2])}"
            )
        if self.empty_documents:
            lines.append(f"left out: {counted(self.empty_documents, 'document')} without anything to learn from")
        if self.truncated_documents:
            side = "beginnings" if self.long_rows == "keep_end" else "ends"
            lines.append(
                f"cut off at seq_length: {counted(self.truncated_documents, 'document')} (raise seq_length to "
                f"keep {side}, or choose with --long_rows)"
            )
        if self.split_documents:
            lines.append(
                f"split at seq_length: {counted(self.split_documents, 'document')}; later windows lack their beginning"
            )
        if self.dropped_documents and self.long_rows == "drop":
            lines.append(
                f"left out: {counted(self.dropped_documents, 'document')} longer than seq_length (--long_rows drop)"
            )
        elif self.dropped_documents:
            what = "window" if self.long_rows == "split" else "document"
            lines.append(
                f"left out: {counted(self.dropped_documents, what)} without a trained token within seq_length: raise it"
            )
        unused = [f"{column!r} ({counted(count, 'row')})" for column, count in self.unused_columns.items()]
        if unused:
            lines.append(f"columns that are not used: {', '.join(unused)}")
        lines += [f"{words} ({counted(count, 'row')})" for words, count in self.notices.items()]
        return lines + self.notes

    def _room(self) -> str:
        """The length of rows and what of it is padding; without packing that is settled by each micro-batch."""
        if self.kind == "packed":
            return f"of {self.seq_length} tokens, packed, {self.padding_share:.1%} padding"
        mean = self.train_tokens / max(1, self.train_rows)
        return f"of {mean:.0f} tokens on average (at most {self.seq_length}), padded to a micro-batch's longest"

    def header(self) -> dict[str, Any]:
        """Count what bears loss, for the run's header: two runs are comparable where these numbers agree."""
        return {
            "source": self.source,
            "shape": self.shape,
            "rows": {
                "train": self.train_rows,
                "eval": self.eval_rows,
                "seq_length": self.seq_length,
                "kind": self.kind,
            },
            "documents": self.documents,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "loss_tokens_per_document": {"mean": self.loss_tokens / max(1, self.documents), **self.loss_tokens_range},
            "documents_by_tenths_of_loss": self.loss_shares,
            "bad_rows": self.bad_rows,
            "empty_documents": self.empty_documents,
            "cut_documents": self.truncated_documents,
            "split_documents": self.split_documents,
            "dropped_documents": self.dropped_documents,
            "unused_columns": self.unused_columns,
            "notices": self.notices,
            "end_tokens": self.end_tokens,
        }
