"""The token cache: every document of a source as tokens on the drive, built once per (data, tokenizer, format).

Arrays: `tokens` uint32 (top bit = no loss), `offsets` int64 [documents + 1], `is_text` uint8 [documents] (1: plain
text, which may be cut into windows), `first_loss` int64 [documents] (position in the document of the first token that
carries loss, the first token apart; the document's length if none does). The length of rows does not enter here but in
the layout, so that another seq_length does not tokenise again. Memory while building does not grow with the data: a
batch of 1 Mi characters is under way at a time."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from outcore.common.quantities import counted, format_count
from outcore.data.basis import DataError, DataSettings
from outcore.data.cache.arrays import Arrays, ArraysWriter, ArrayWriter
from outcore.data.cache.batches import Batch, RowPiece, Whole, batches_of, encode_in_order
from outcore.data.cache.checked import CheckedArray
from outcore.data.cache.encode import TOKEN, DocumentEncoder, carries_loss
from outcore.data.cache.lock import open_or_build
from outcore.data.rows import ChatExample, shaped_records
from outcore.data.sources import BadRow, BadRows, Source, translate

CACHE_VERSION = 5
"""Part of every key: raise it when what is stored, or how text becomes tokens, changes."""
TELL_EVERY_S = 10.0
LOSS_SHARES = 10
"""Documents are counted by the share of their tokens that carry loss, in tenths."""


@dataclass(frozen=True)
class RowLimit:
    """Reading stops when this many rows are certain: `packed` rows of `seq_length` tokens, or documents."""

    rows: int
    seq_length: int
    packed: bool


@dataclass(frozen=True)
class TokenCache:
    """Opened cache of one source."""

    arrays: Arrays
    key: str
    hit: bool
    tokens: CheckedArray

    @property
    def offsets(self) -> np.ndarray:
        return self.arrays["offsets"]

    @property
    def first_loss(self) -> np.ndarray:
        return self.arrays["first_loss"]

    @property
    def is_text(self) -> np.ndarray:
        return self.arrays["is_text"]

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def meta(self) -> Any:
        return self.arrays.meta


def digest_of(value: Any) -> str:
    """Short hash of a JSON-able value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=10).hexdigest()


def open_token_cache(
    source: Source,
    settings: DataSettings,
    encoder: DocumentEncoder,
    tokenizer_hash: str,
    limit: RowLimit | None,
    say: Callable[[str], None],
) -> TokenCache:
    """The cache of `source`, built if it is not there or damaged; only one process builds, the others wait for it.

    Raises DataError (malformed row, no such column, nothing that bears loss) or CacheError (folder, drive, lock)."""
    description = {
        "version": CACHE_VERSION,
        "source": source.identity(),
        "tokenizer": tokenizer_hash,
        "format": settings.format,
        "columns": [settings.text_column, settings.prompt_column, settings.completion_column, settings.messages_column],
        "on_bad_row": settings.on_bad_row,
        "as_chat": settings.as_chat,
        "train_on_prompt": settings.train_on_prompt,
        "train_on_last_turn": settings.train_on_last_turn,
        "encoder_decoder": encoder.encoder_decoder,
        "limit": None if limit is None else [limit.rows, limit.seq_length, limit.packed],
    }
    key = digest_of(description)
    path = cache_folder(settings) / f"tokens-{key}"
    arrays, hit = open_or_build(
        path,
        lambda writer: _build(writer, source, settings, encoder, limit, description, say),
        timeout_s=settings.lock_timeout_s,
        say=say,
        what=f"the tokens of {source.name}",
    )
    return TokenCache(arrays, key, hit, arrays.checked("tokens"))


def cache_folder(settings: DataSettings) -> Path:
    """The folder that `cache_dir` means."""
    return translate(settings.cache_dir)


def _build(
    writer: ArraysWriter,
    source: Source,
    settings: DataSettings,
    encoder: DocumentEncoder,
    limit: RowLimit | None,
    description: dict[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    bad_rows = BadRows(settings.on_bad_row)
    records = shaped_records(source, settings)
    first = next(records, None)
    if first is None:
        raise DataError(f"{source.name} is empty: it has no row")
    say(f"tokenising {source.name}" + ("" if source.is_text else f": {first[1]}"))
    documents = _Documents(writer, encoder, bad_rows, limit)
    told_s = time.monotonic()
    for batch in encode_in_order(
        batches_of(chain([first], records), as_chat=settings.as_chat), encoder, settings.num_proc
    ):
        documents.add(batch)
        if documents.is_enough:
            break
        if time.monotonic() - told_s >= TELL_EVERY_S:
            told_s = time.monotonic()
            tokens = format_count(documents.tokens.length)
            say(f"tokenised {counted(documents.count, 'document')}, {tokens} tokens so far")
    if documents.count == 0 and documents.empty == 0 and bad_rows.examples:
        raise DataError(f"{source.name} has no usable row; the first one: {bad_rows.examples[0]}")
    if documents.count == 0:
        raise DataError(
            f"{source.name} has nothing that bears loss: "
            f"{counted(documents.empty, 'empty document')} and {counted(bad_rows.count, 'malformed one')}"
            + (f", e.g. {bad_rows.examples[0]}" if bad_rows.examples else "")
        )
    documents.finish()
    return {
        "key": description,
        "shape": "; ".join(documents.shape_firsts),
        "shape_firsts": documents.shape_firsts,
        "is_text": documents.text_documents == documents.count,
        "uses_template": documents.conversations > 0,
        "templates": encoder.chat.describe() if documents.conversations and not encoder.encoder_decoder else [],
        "documents": documents.count,
        "empty_documents": documents.empty,
        "tokens": documents.tokens.length,
        "max_token_id": documents.max_token_id,
        "loss_tokens": documents.loss_tokens,
        "bad_rows": bad_rows.count,
        "bad_row_examples": bad_rows.examples,
        "unused_columns": dict(documents.unused_columns.most_common()),
        "notices": dict(documents.notices.most_common()),
        "end_tokens": documents.end_tokens,
        "loss_share_counts": documents.loss_shares,
        "loss_tokens_range": {"least": documents.loss_least, "most": documents.loss_most},
        "source": source.name,
        "stopped_early": documents.is_enough,
    }


class _Documents:
    """Appends documents to the arrays, joins pieces, counts, and takes back a document whose file breaks half-way."""

    def __init__(
        self, writer: ArraysWriter, encoder: DocumentEncoder, bad_rows: BadRows, limit: RowLimit | None
    ) -> None:
        self.tokens: ArrayWriter = writer.array("tokens", np.uint32)
        self.offsets: ArrayWriter = writer.array("offsets", np.int64)
        self.first_loss: ArrayWriter = writer.array("first_loss", np.int64)
        self.is_text: ArrayWriter = writer.array("is_text", np.uint8)
        self.encoder = encoder
        self.before, self.after = encoder.edges
        self.bad_rows, self.limit = bad_rows, limit
        self.count = self.empty = self.loss_tokens = self.max_token_id = 0
        self.text_documents = self.conversations = 0
        self.shape_firsts: dict[str, int] = {}
        self.loss_least, self.loss_most = sys.maxsize, 0
        self._text: list[int] = []
        self._answer_ends: set[tuple[int, bool]] = set()
        self.notices: Counter[str] = Counter()
        self.unused_columns: Counter[str] = Counter()
        self.loss_shares = [0] * LOSS_SHARES
        self._ends: list[int] = [0]
        self._first: list[int] = []
        self._start: int | None = None
        self._first_token = self._row_tokens = 0
        self._last_id = -1

    @property
    def is_enough(self) -> bool:
        if self.limit is None:
            return False
        return self.count >= self.limit.rows and (
            not self.limit.packed or self._row_tokens >= self.limit.rows * self.limit.seq_length
        )

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that the model learns to end its answers with: those at the end of documents, where any are. Inside a
        conversation some templates end a turn otherwise than at its end."""
        last = {token for token, ends_document in self._answer_ends if ends_document}
        return sorted(last or {token for token, _ in self._answer_ends})

    def add(self, batch: Batch) -> None:
        self.notices.update(batch.notices)
        self.unused_columns.update(batch.unused_columns)
        for item, encoded in zip(batch.items, batch.encoded, strict=True):
            if self.is_enough:
                return
            if isinstance(encoded, BadRow):
                self._take_back()
                self.bad_rows.add(encoded)
                continue
            if len(encoded):
                self.max_token_id = max(self.max_token_id, int((encoded & TOKEN).max()))
            if isinstance(item, RowPiece):
                self._add_piece(encoded, item)
            elif not carries_loss(encoded)[1:].any():
                self.empty += 1
            else:
                assert isinstance(item, Whole)
                is_chat = isinstance(item.example, ChatExample)
                self.conversations += is_chat
                if end := self.encoder.answer_end(encoded, is_chat):
                    self._answer_ends.add(end)
                has_loss = carries_loss(encoded)
                self.tokens.append(encoded)
                self._text.append(0)
                self.shape_firsts.setdefault(item.shape, self.count)
                self._close(len(encoded), 1 + int(np.argmax(has_loss[1:])), int(has_loss[1:].sum()))

    def _add_piece(self, ids: np.ndarray, piece: RowPiece) -> None:
        if self._start is None:
            self._start = self.tokens.length
            if not (len(self.before) and len(ids) and ids[0] == self.before[0]):  # the text may begin with BOS itself
                self.tokens.append(self.before)
            self._first_token = self.tokens.length
        self.tokens.append(ids)
        if len(ids):
            self._last_id = int(ids[-1])
        if not piece.is_last:
            return
        if self.tokens.length == self._first_token:
            self._take_back()
            self.empty += 1
            return
        if self._last_id != int(self.after[0]):
            self.tokens.append(self.after)
        length = self.tokens.length - self._start
        self._start = None
        self._text.append(1)
        self.shape_firsts.setdefault(piece.shape, self.count)
        self.text_documents += 1
        self._close(length, 1, length - 1)

    def _take_back(self) -> None:
        if self._start is not None:
            self.tokens.truncate(self._start)
            self._start = None

    def _close(self, length: int, first_loss: int, loss_tokens: int) -> None:
        self.count += 1
        self.loss_tokens += loss_tokens
        self.loss_least, self.loss_most = min(self.loss_least, loss_tokens), max(self.loss_most, loss_tokens)
        self.loss_shares[min(LOSS_SHARES - 1, LOSS_SHARES * loss_tokens // max(1, length - 1))] += 1
        self._row_tokens += length if self.limit is None else min(length, self.limit.seq_length)
        self._ends.append(self.tokens.length)
        self._first.append(first_loss)
        if len(self._first) >= 65536:
            self._flush()

    def _flush(self) -> None:
        self.offsets.append(np.asarray(self._ends, dtype=np.int64))
        self.first_loss.append(np.asarray(self._first, dtype=np.int64))
        self.is_text.append(np.asarray(self._text, dtype=np.uint8))
        self._ends, self._first, self._text = [], [], []

    def finish(self) -> None:
        assert self._start is None, "a document was left open"
        self._flush()
