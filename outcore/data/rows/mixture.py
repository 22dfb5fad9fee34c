"""A source's rows with the shape of the file that they stand in: the files of one folder may be of different shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, groupby

from outcore.data.basis import DataError, DataSettings
from outcore.data.rows.shapes import Shape, detect_shape
from outcore.data.sources import BadRow, Record, Source

DETECT_ROWS = 16
TEXT = Shape("text", ("text",))


def shaped_records(source: Source, settings: DataSettings) -> Iterator[tuple[Record | BadRow, Shape]]:
    """Every record with the shape that the first rows of its file show.

    Raises DataError when a file's rows have no known shape, or settings name columns of a text that has none.
    """
    if source.is_text:
        _check_text(source, settings)
        return ((record, TEXT) for record in source.records())
    return _by_file(source.records(), settings)


def _by_file(records: Iterable[Record | BadRow], settings: DataSettings) -> Iterator[tuple[Record | BadRow, Shape]]:
    for name, group in groupby(records, key=lambda record: record.where.path):
        head: list[Record | BadRow] = []
        rows = 0
        for record in group:
            head.append(record)
            rows += isinstance(record, Record)
            if rows and len(head) >= DETECT_ROWS:
                break
        usable = [record.row for record in head if isinstance(record, Record)]
        shape = detect_shape(usable, settings, name) if usable else TEXT
        yield from ((record, shape) for record in chain(head, group))


def _check_text(source: Source, settings: DataSettings) -> None:
    if settings.format not in ("auto", "text"):
        raise DataError(
            f"{source.name} is plain text, but the format is {settings.format!r}: use --data_format text or auto"
        )
    for setting in ("text_column", "prompt_column", "messages_column"):
        if (column := getattr(settings, setting)) is not None:
            raise DataError(f"{setting} is {column!r}, but {source.name} is plain text, which has no columns: drop it")
