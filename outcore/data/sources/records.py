"""Results of a source: records with the place they came from, or the reason why a row is none.

Sources are iterated once per cache build and hold one row, or one block of a large text, at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from outcore.data.basis import DataError


class Where(NamedTuple):
    """Location of a row: 'data/x.jsonl, line 12'."""

    path: str
    unit: str = "line"
    number: int | None = None

    def __str__(self) -> str:
        return self.path if self.number is None else f"{self.path}, {self.unit} {self.number}"


@dataclass(frozen=True, slots=True)
class Record:
    """One row; `continued` means that the text goes on in the next record (blocks of one large document)."""

    where: Where
    row: dict[str, Any]
    continued: bool = False


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, and what was wrong with it. It ends a document whose blocks came before."""

    where: Where
    problem: str

    def error(self) -> DataError:
        return DataError(f"{self.where}: {self.problem}")


class RowError(ValueError):
    """Raised while one row is turned into an example; becomes a BadRow with its place."""


def is_sound(text: str) -> bool:
    """False for a text with half of a surrogate pair, which JSON can spell and no tokenizer can take."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def half_a_pair(text: str) -> str:
    """Name what is wrong with a text that is not sound."""
    half = next(character for character in text if 0xD800 <= ord(character) < 0xE000)
    return f"a text contains half of a surrogate pair (U+{ord(half):04X}), which is no character"


def without_filled_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a file with typed columns, without the nulls that such a file fills in.

    There every object of a column has the keys of all of them, so that one row's tool arguments appear as nulls in the
    others. The row's own columns stay, null or not."""
    return {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@dataclass
class BadRows:
    """Applies on_bad_row: raises at once, or counts and keeps the first few for the report."""

    policy: str
    count: int = 0
    examples: list[str] = field(default_factory=list)
    keep: int = 5

    def add(self, bad: BadRow) -> None:
        if self.policy == "error":
            raise DataError(f"{bad.error()}. Correct the row, or leave such rows out and count them: --on_bad_row skip")
        self.count += 1
        if len(self.examples) < self.keep:
            self.examples.append(str(bad.error()))


class Source(Protocol):
    """Source of rows. `is_text`: every record is a document of text in the column "text"."""

    name: str
    is_text: bool

    def identity(self) -> dict[str, Any]:
        """JSON-able description that changes when the data changes; part of the cache key."""
        ...

    def records(self) -> Iterator[Record | BadRow]: ...

    def again(self, place: str) -> tuple[Iterator[Record | BadRow], bool]:
        """(records of the file at this place once more, whether all of them have the same columns); of a stream the
        first ones."""
        ...

    def notes(self) -> list[str]:
        """List what a person should know about how the data was understood."""
        ...
