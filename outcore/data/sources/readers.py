"""Readers of single files: text, jsonl, json, csv/tsv, parquet. Each yields records in file order, one row in RAM at
a time.

json: an array is parsed element by element from a growing buffer; an object is read whole (it must be small) and its
one list of rows taken; objects line by line are recognised as jsonl. A malformed row is yielded as BadRow with file and
line, and reading goes on behind it wherever the format allows that."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from outcore.common.quantities import MIB, format_gib
from outcore.data.basis import DataError, shorten
from outcore.data.sources.records import BadRow, Record, Where, without_filled_nulls
from outcore.data.sources.textfile import HEAD_BYTES, BadText, decode, iterate_lines, iterate_text, plain_suffix

PARQUET_ROWS = 1024
MAX_JSON_OBJECT_BYTES = 512 * MIB
"""A .json file that is one object is parsed whole, at about ten times its size in RAM."""
MAX_JSON_ELEMENT_CHARS = 64 * MIB
HEAD_MIB = 5
"""Beginning read of a .jsonl file whose first line is no whole object, to see whether the object goes on in the next
lines."""

RowsOf = Iterator[Record | BadRow]


def read_text(path: Path) -> RowsOf:
    """The whole file as one document, in blocks."""
    where = Where(str(path))
    previous: str | None = None
    try:
        for block in iterate_text(path):
            if previous is not None:
                yield Record(where, {"text": previous}, continued=True)
            previous = block
    except BadText as error:
        yield BadRow(where, _without_path(error, path))
        return
    if previous is not None:
        yield Record(where, {"text": previous})


def read_jsonl(path: Path) -> RowsOf:
    """One JSON object a line; blank lines are passed over. Objects over several lines, and an array, are told apart."""
    first = next((line for _, _, line in iterate_lines(path) if line.strip()), b"").lstrip()
    if not first.startswith((b"{", b"[")) or (first.startswith(b"{") and _is_whole_json(first)):
        return _read_lines(path)
    try:
        head = "".join(islice(iterate_text(path, MIB), HEAD_MIB)).lstrip()
    except BadText:
        return _read_lines(path)
    if head.startswith("[") and head[1:].lstrip().startswith("{"):
        return _read_json_values(path, is_array=True)
    if head.startswith("{") and _spans_lines(head):
        return _read_json_values(path, is_array=False)
    return _read_lines(path)


def _read_lines(path: Path) -> RowsOf:
    for number, offset, line in iterate_lines(path):
        where = Where(str(path), "line", number)
        if not line.strip():
            continue
        try:
            row = _parsed(decode(line, path, offset))
        except BadText as error:
            yield BadRow(where, _without_path(error, path))
        except json.JSONDecodeError as error:
            yield BadRow(
                where,
                f"not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}: {shorten(error.doc, 80)!r}",
            )
        else:
            yield Record(where, row) if isinstance(row, dict) else BadRow(where, _not_an_object(row))


def read_csv(path: Path) -> RowsOf:
    """Comma-separated (.csv) or tab-separated (.tsv) with a header line; quoted fields may hold line breaks."""
    delimiter = "\t" if plain_suffix(path) == ".tsv" else ","
    bad_bytes: list[BadText] = []

    def lines() -> Iterator[str]:
        for _, offset, line in iterate_lines(path, keep_ends=True):
            try:
                yield decode(line, path, offset)
            except BadText as error:
                bad_bytes.append(error)
                yield line.decode("utf-8", errors="replace")

    usual_limit = csv.field_size_limit()
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # documents are longer than csv's 128 KiB
    try:
        rows = csv.reader(lines(), delimiter=delimiter, strict=True)
        try:
            header = next(rows)
        except StopIteration:
            return
        header = [name.strip() for name in header]
        _check_csv_header(header, delimiter, path)
        while True:
            number = rows.line_num + 1
            where = Where(str(path), "line", number)
            try:
                values = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRow(where, f"not valid CSV: {error}")
                continue
            if bad_bytes:
                yield BadRow(where, _without_path(bad_bytes.pop(), path))
                bad_bytes.clear()
            elif not values:
                continue
            elif len(values) != len(header):
                yield BadRow(where, f"{len(values)} fields where the header has {len(header)} ({', '.join(header)})")
            else:
                yield Record(where, dict(zip(header, values)))
    finally:
        csv.field_size_limit(usual_limit)


def _check_csv_header(header: list[str], delimiter: str, path: Path) -> None:
    if len(header) == 1:
        for other, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
            if other != delimiter and other in header[0]:
                raise DataError(
                    f"{path}, line 1: the columns seem to be separated by {name}: {shorten(header[0], 60)!r}. "
                    f"Save it with commas (or as .tsv with tabs)"
                )
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise DataError(f"{path}, line 1: column name(s) {', '.join(map(repr, repeated))} appear more than once")


def read_json(path: Path) -> RowsOf:
    """An array of objects, or one object that holds such an array, or (seen by its first line) jsonl."""
    head = next((block for block in iterate_text(path, HEAD_BYTES) if block.strip()), "").lstrip()
    if not head:
        return iter(())
    if head[0] == "[":
        return _read_json_values(path, is_array=True)
    if head[0] != "{":
        raise DataError(f"{path}, line 1: expected an array of objects or an object, found {shorten(head, 40)!r}")
    lines = (line for _, _, line in iterate_lines(path) if line.strip())
    if _is_whole_json(next(lines)) and next(lines, None) is not None:
        return read_jsonl(path)
    return _read_json_object(path)


def _parsed(text: str | bytes, decode: Callable[..., Any] = json.loads, *more: Any) -> Any:
    """The value that the text, or the text from a position on, spells; nesting that is too deep is a fault like any."""
    try:
        return decode(text, *more)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text if isinstance(text, str) else "", 0) from None


def _is_whole_json(line: bytes) -> bool:
    try:
        _parsed(line)
    except ValueError:
        return False
    return True


def _spans_lines(head: str) -> bool:
    """True when the file's first object is whole but not in one line."""
    first = head.partition("\n")[0]
    try:
        value, end = _parsed(head, json.JSONDecoder().raw_decode)
    except ValueError:
        return False
    return isinstance(value, dict) and end > len(first)


def _read_json_values(path: Path, *, is_array: bool) -> RowsOf:
    """Objects one behind the other, in an array or with white space between them, from a growing buffer."""
    blocks = iterate_text(path, MIB)
    decoder = json.JSONDecoder()
    buffer, line, element = next(block for block in blocks if block.strip()), 1, 0
    position = buffer.index("[") + 1 if is_array else 0
    line += buffer.count("\n", 0, position)
    between = " \t\n\r," if is_array else " \t\n\r"
    more = True
    while True:
        end = position
        while end < len(buffer) and buffer[end] in between:
            end += 1
        line += buffer.count("\n", position, end)
        position = end
        if is_array and position < len(buffer) and buffer[position] == "]":
            return
        if position == len(buffer) and not more and not is_array:
            return
        problem = "the array is not closed: the file seems cut short"
        if position < len(buffer):
            try:
                value, end = _parsed(buffer, decoder.raw_decode, position)
            except json.JSONDecodeError as error:
                at_line = line + buffer.count(chr(10), position, error.pos)
                problem = f"not valid JSON: {error.msg.removesuffix(' at')} at line {at_line}"
            else:
                element += 1
                where = Where(str(path), "line", line)
                yield Record(where, value) if isinstance(value, dict) else BadRow(where, _not_an_object(value))
                line += buffer.count("\n", position, end)
                position = end
                continue
        pending = len(buffer) - position
        if more and pending < MAX_JSON_ELEMENT_CHARS:
            # Doubling what is read keeps the repeated parsing of one long element linear.
            parts = [buffer[position:]]
            wanted = max(MIB, pending)
            while wanted > 0 and (block := next(blocks, None)) is not None:
                parts.append(block)
                wanted -= len(block)
            more = wanted <= 0
            buffer, position = "".join(parts), 0
            continue
        yield BadRow(
            Where(str(path), "line", line), f"{problem} (element {element + 1}); nothing behind it can be read"
        )
        return


def _read_json_object(path: Path) -> RowsOf:
    if path.stat().st_size > MAX_JSON_OBJECT_BYTES:
        raise DataError(
            f"{path} is one JSON object of {format_gib(path.stat().st_size)}, which would have to be parsed whole. "
            f"Convert it to jsonl: one object a line"
        )
    text = "".join(iterate_text(path))
    try:
        value = _parsed(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {error.lineno}: not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from error
    lists = {key: rows for key, rows in value.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)}
    if len(lists) != 1 or "role" in next(iter(lists.values()))[0] or "from" in next(iter(lists.values()))[0]:
        yield Record(Where(str(path), "row", 1), value)
        return
    key, rows = next(iter(lists.items()))
    for number, row in enumerate(rows, start=1):
        where = Where(f"{path} [{key}]", "element", number)
        yield Record(where, row) if isinstance(row, dict) else BadRow(where, _not_an_object(row))


def read_parquet(path: Path) -> RowsOf:
    """Row groups in slices of 1024 rows."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(Where(str(path), "row", number), without_filled_nulls(row))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is not a readable parquet file ({shorten(str(error))}). Was it damaged or cut short? Copy it again"
        ) from error


READERS: dict[str, Callable[[Path], RowsOf]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}


TABLES = (".csv", ".tsv", ".parquet")
"""Files in which every row has the same columns."""


def _not_an_object(value: Any) -> str:
    return f"expected an object with named columns, found {type(value).__name__}: {shorten(repr(value), 60)}"


def _without_path(error: BadText, path: Path) -> str:
    return str(error).removeprefix(str(path)).lstrip(": ").removeprefix("is ")
