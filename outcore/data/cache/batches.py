"""Batches of examples on their way to tokens: bounded in characters, encoded in this process or in several, in order.

Fast tokenizers thread by themselves, so one process is the default. Workers are started afresh (spawn), so that neither
CUDA nor a tokenizer's threads are forked; at most two batches per worker are under way, so that memory stays bounded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import numpy as np

from outcore.data.cache.encode import DocumentEncoder, cut_text
from outcore.data.rows import NUMBERS, ChatExample, Example, Shape, TextExample, TokensExample
from outcore.data.sources import BadRow, Record, RowError, Where, half_a_pair, is_sound

BATCH_CHARS = 1024 * 1024
BATCH_ITEMS = 512


@dataclass(frozen=True, slots=True)
class RowPiece:
    """A piece of a text document; the last one closes the document."""

    text: str
    is_last: bool
    shape: str = "text"


@dataclass(frozen=True, slots=True)
class Whole:
    """An example that is tokenised in one go, and where it came from."""

    example: Example
    where: Where
    shape: str


@dataclass
class Batch:
    """Items in order, and what they became: tokens with loss bits (pieces: bare ids), or a BadRow."""

    items: list[RowPiece | Whole | BadRow]
    encoded: list[np.ndarray | BadRow] = field(default_factory=list)
    notices: Counter[str] = field(default_factory=Counter)
    """Notices of what the chat template does not write -> in how many rows."""
    unused_columns: Counter[str] = field(default_factory=Counter)
    """Columns that the shape of the rows does not read."""


def encode_batch(batch: Batch, encoder: DocumentEncoder) -> Batch:
    """Fills `encoded`; all pieces go to the tokenizer in one call, and so do all conversations."""
    pieces = iter(encoder.encode_pieces([item.text for item in batch.items if isinstance(item, RowPiece)]))
    wholes = [item.example for item in batch.items if isinstance(item, Whole)]
    encoded = iter(encoder.encode_many(wholes, batch.notices))
    for item in batch.items:
        if isinstance(item, RowPiece):
            batch.encoded.append(next(pieces))
        elif isinstance(item, BadRow):
            batch.encoded.append(item)
        else:
            tokens = next(encoded)
            batch.encoded.append(BadRow(item.where, str(tokens)) if isinstance(tokens, RowError) else tokens)
    return batch


def batches_of(records: Iterable[tuple[Record | BadRow, Shape]], *, as_chat: bool = False) -> Iterator[Batch]:
    """Groups records into batches of about 1 Mi characters, cutting long texts into pieces. `as_chat`: prompts with
    completions become conversations of two messages."""
    items: list[RowPiece | Whole | BadRow] = []
    unused: Counter[str] = Counter()
    notices: Counter[str] = Counter()
    chars = 0
    for record, shape in records:
        if isinstance(record, Record):
            unused.update(shape.unused(record.row))
            notices.update(NUMBERS.format(column=column) for column in shape.numbers(record.row))
        for item in _items_of(record, shape, as_chat=as_chat):
            items.append(item)
            chars += _chars(item)
            if chars >= BATCH_CHARS or len(items) >= BATCH_ITEMS:
                yield Batch(items, notices=notices, unused_columns=unused)
                items, unused, notices, chars = [], Counter(), Counter(), 0
    if items:
        yield Batch(items, notices=notices, unused_columns=unused)


def _items_of(record: Record | BadRow, shape: Shape, *, as_chat: bool) -> Iterator[RowPiece | Whole | BadRow]:
    if isinstance(record, BadRow):
        yield record
        return
    try:
        example = shape.example(record.row)
    except (RowError, RecursionError) as error:
        yield BadRow(record.where, "nested too deeply" if isinstance(error, RecursionError) else str(error))
        return
    if as_chat and isinstance(example, TextExample) and example.prompt is not None:
        asked, told = {"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.text}
        example = ChatExample([asked, told])
    if not isinstance(example, TextExample) or example.prompt is not None:
        yield Whole(example, record.where, str(shape))
        return
    if not is_sound(example.text):
        yield BadRow(record.where, half_a_pair(example.text))
        return
    previous: str | None = None
    for piece in cut_text(example.text):
        if previous is not None:
            yield RowPiece(previous, is_last=False, shape=str(shape))
        previous = piece
    yield RowPiece(previous or "", is_last=not record.continued, shape=str(shape))


def _chars(item: RowPiece | Whole | BadRow) -> int:
    if isinstance(item, BadRow):
        return 0
    if isinstance(item, RowPiece):
        return len(item.text)
    if isinstance(item.example, TokensExample):
        return len(item.example.ids)
    if isinstance(item.example, TextExample):
        return len(item.example.text) + len(item.example.prompt or "")
    return sum(len(message["content"]) for message in item.example.messages)


def encode_in_order(batches: Iterable[Batch], encoder: DocumentEncoder, num_proc: int) -> Iterator[Batch]:
    """The batches with their tokens, in the order they came."""
    if num_proc == 1:
        for batch in batches:
            yield encode_batch(batch, encoder)
        return
    pending: deque[Future[Batch]] = deque()
    with ProcessPoolExecutor(num_proc, mp_context=get_context("spawn")) as pool:
        try:
            for batch in batches:
                pending.append(pool.submit(encode_batch, batch, encoder))
                if len(pending) >= 2 * num_proc:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
