"""Rows of a source with their pictures: read as every other row is, the places of pictures marked in the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outcore.common.quantities import counted
from outcore.data.basis import DataError, DataSettings
from outcore.data.pictures.conversation import PictureTalk, conversation_of, in_order, marked
from outcore.data.pictures.picture import LIMITS, PictureError, PictureLimits
from outcore.data.rows import ChatExample, Shape, TextExample, shaped_records
from outcore.data.sources import BadRow, BadRows, Record, RowError, Where, open_source

PICTURE_COLUMNS = ("images", "image")


@dataclass(frozen=True)
class PictureRow:
    """A row whose pictures can be read; they are read anew each time, so that a set larger than RAM has room."""

    where: Where
    example: ChatExample
    values: tuple[Any, ...]
    folder: Path
    limits: PictureLimits = LIMITS

    def conversation(self) -> PictureTalk:
        """Messages and pixels. DataError names the row, should a file have changed since."""
        try:
            return conversation_of(self.example.messages, list(self.values), self.folder, self.limits)
        except PictureError as error:
            raise DataError(f"{self.where}: {error}") from error


def picture_rows(settings: DataSettings, name: str, say: Callable[[str], None]) -> list[PictureRow]:
    """The rows of a source, each read once whole, pictures too. DataError names the first that cannot be used; with
    on_bad_row skip they are left out and counted."""
    source = open_source(replace(settings, dataset=name))
    bad, found, said = BadRows(settings.on_bad_row), list[PictureRow](), list[str]()
    for record, shape in shaped_records(source, settings):
        if isinstance(record, BadRow):
            bad.add(record)
            continue
        try:
            row = _row(record, shape)
            said += [f"{row.where}: {line}" for line in row.conversation().said]
        except (RowError, PictureError) as error:
            bad.add(BadRow(record.where, str(error)))
            continue
        except DataError as error:
            bad.add(BadRow(record.where, str(error).removeprefix(f"{record.where}: ")))
            continue
        found.append(row)
        if settings.max_train_samples and len(found) == settings.max_train_samples:
            break
    if bad.count:
        say(f"left out: {counted(bad.count, 'row')} ({bad.examples[0]})")
    if said:
        say(f"pictures: {said[0]}" + (f" (and {len(said) - 1:,} more)" if len(said) > 1 else ""))
    if not found:
        raise DataError(f"{name} has no row that can be used")
    return found


def _row(record: Record, shape: Shape) -> PictureRow:
    row = dict(record.row)
    column = next((name for name in PICTURE_COLUMNS if row.get(name) not in (None, "", [], {})), None)
    given = row.pop(column) if column else []
    own = list[Any]()
    for name in shape.columns:
        row[name] = marked(row.get(name), own)
    example = shape.example(row)
    if isinstance(example, TextExample) and example.prompt is not None:
        asked, told = {"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.text}
        example = ChatExample([asked, told])
    if not isinstance(example, ChatExample):
        raise RowError(f"rows with pictures are questions and answers, or messages; this one is {shape}")
    if example.tools or example.variables:
        raise RowError("tools and chat_template_kwargs are not read in rows with pictures: drop the column")
    return PictureRow(record.where, example, tuple(in_order(own, given)), Path(record.where.path).parent)
