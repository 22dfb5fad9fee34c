"""Shapes of rows: one table of what each is known by, what is asked, what carries loss; and how columns choose.

Columns named in the settings decide; otherwise the names of all columns of the file do, whatever row they stand in, and
then their values. Every row must have the shape of its file: one that has not is a bad row, with the reason. A question
is never trained as plain text because its answer was no text. A column that a shape does not use is counted and named,
never dropped without a word.

A source's rows with the shape of the file that they stand in: the files of one folder may be of different shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from outcore.data.basis import DataError, DataSettings, nearest
from outcore.data.rows import readings
from outcore.data.rows.examples import Example
from outcore.data.rows.messages import is_number, message_list
from outcore.data.sources import BadRow, Record, RowError, Source

TEXT_COLUMNS = ("text", "content", "document", "body", "raw_content", "markdown", "code")
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat")
PROMPT_COLUMNS = ("prompt", "question", "query", "problem", "input", "source")
COMPLETION_COLUMNS = ("completion", "response", "output", "solution", "answer", "target", "chosen")
"""In the order of preference: a worked solution is trained before the bare answer beside it."""
SOURCE_PARTNERS = ("target",)
"""`source` is a prompt beside these only; elsewhere it names where a row comes from."""
ANSWERS_TO_INSTRUCTION = ("output", "response", "completion", "answer")
KNOWN_COLUMNS = frozenset(
    {*TEXT_COLUMNS, *CONVERSATION_COLUMNS, *PROMPT_COLUMNS, *COMPLETION_COLUMNS, "instruction", "rejected", "input_ids"}
)
"""Columns that decide about the shape."""
MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
PLACEHOLDERS = ("<image>", "<audio>", "<video>", "<|image|>", "<|image_pad|>")
TEXT_EXTRAS = ("input", "context", "system")
NUMBERS = "numbers and booleans in column {column!r} are written as text"
_CHAT_EXTRAS = ("tools", "functions", "chat_template_kwargs")


@dataclass(frozen=True)
class Kind:
    """One line of the table of shapes."""

    name: str
    known_by: str
    """The columns that make a row one of this kind, in words."""
    asked: str
    """Parts that carry no loss, in words."""
    loss: str
    """Parts that carry loss, in words."""
    extras: tuple[str, ...]
    """Further columns that are used where a row has them."""
    read: Callable[[Mapping[str, Any], tuple[str, ...]], Example]


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("tokens", "input_ids", "labels of -100, masks of 0", "labels, or every token where there are none",
             ("labels", "attention_mask", "assistant_masks", "completion_mask"), readings.tokens),
        Kind("messages", "messages (or conversations, dialog, chat) of {role, content}", "all other messages",
             "every assistant message: reasoning, words, tool calls, end of turn",
             ("system", *_CHAT_EXTRAS), readings.conversation),
        Kind("sharegpt", "conversations of {from, value}", "all other messages",
             "every assistant (gpt, function_call) message", ("system", *_CHAT_EXTRAS), readings.conversation),
        Kind("alpaca", "instruction + output (or response, completion, answer)",
             "system, history's questions, instruction, input or context", "output, and history's answers",
             ("input", "context", "history", "system", *_CHAT_EXTRAS), readings.alpaca),
        Kind("prompt_completion", "prompt + completion, question + answer, problem + solution, ...",
             "the prompt, with context before it; a list of messages too", "the completion",
             ("context", "rejected", *_CHAT_EXTRAS), readings.pair),
        Kind("preference", "chosen + rejected", "what chosen and rejected have in common", "the rest of chosen",
             ("rejected", *_CHAT_EXTRAS), readings.preference),
        Kind("text", "text (or content, document, ...; or the only column of text)", "nothing", "all of it", (),
             readings.text),
    )
}  # fmt: skip
"""Name -> kind, in the order in which rows are tried."""


@dataclass(frozen=True)
class Shape:
    """Shape of rows: the format's name and the columns it is read from."""

    format: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.format} (from {', '.join(self.columns)})"

    @property
    def kind(self) -> Kind:
        """The line of the table."""
        return KINDS[self.format]

    def example(self, row: Mapping[str, Any]) -> Example:
        """One row's example. Raises RowError saying what is wrong with the row."""
        self._check_kind(row)
        for column in self.columns:
            if column not in row:
                raise RowError(f"no column {column!r}{nearest(column, row)}; the row has: {', '.join(row) or 'none'}")
        self._check_media(row)
        return self.kind.read(row, self.columns)

    def unused(self, row: Mapping[str, Any]) -> Iterator[str]:
        """Columns of the row that hold something and that this shape does not read."""
        for column, value in row.items():
            if column not in self.columns and column not in self.kind.extras and value not in (None, "", [], {}):
                yield column

    def numbers(self, row: Mapping[str, Any]) -> Iterator[str]:
        """Columns whose numbers and booleans the row's example has as text."""
        if self.format in ("text", "tokens"):
            return
        for column in (*self.columns, *(extra for extra in TEXT_EXTRAS if extra in self.kind.extras)):
            value = row.get(column)
            messages = message_list(value) or ()
            if is_number(value) or any(is_number(m.get("content", m.get("value"))) for m in messages):
                yield column

    def _check_kind(self, row: Mapping[str, Any]) -> None:
        """RowError for a row without anything in the shape's columns that has what another shape reads."""
        if any(row.get(column) is not None for column in self.columns):
            return
        other = next(iter(_found({c: v for c, v in row.items() if v is not None}, DataSettings()).values()), None)
        if other is not None and other.format != self.format:
            raise RowError(
                f"the row is {other}, and this file is read as {self}, which other rows of it are: a file has rows of "
                "one shape. Give each shape a file of its own (--dataset A --dataset B)"
            )

    def _check_media(self, row: Mapping[str, Any]) -> None:
        for column in MEDIA_COLUMNS:
            if column in self.columns or row.get(column) in (None, "", [], {}):
                continue
            texts = "" if self.format != "text" else str(row[self.columns[0]])
            if self.format != "text" or any(mark in texts for mark in PLACEHOLDERS):
                raise RowError(
                    f"column {column!r} holds media that belong to the text, and only text is trained here (drop the "
                    "column if the text stands without it; pictures are trained by an image-text model, --train_vision)"
                )


def detect_shape(
    rows: Iterable[Mapping[str, Any]], settings: DataSettings, name: str, *, fixed_columns: bool = False
) -> Shape:
    """The shape of a file's rows, all of them; DataError when a named column is missing or no shape fits.

    `fixed_columns`: every row has the same ones, so not all rows need be looked at."""
    seen = _seen(rows, fixed_columns)
    columns = list(seen)
    if settings.text_column:
        return Shape("text", (_existing(settings.text_column, columns, "text_column", name),))
    if settings.prompt_column and settings.completion_column:
        prompt = _existing(settings.prompt_column, columns, "prompt_column", name)
        return Shape(
            "prompt_completion", (prompt, _existing(settings.completion_column, columns, "completion_column", name))
        )
    if settings.messages_column:
        _existing(settings.messages_column, columns, "messages_column", name)
    found = _found(seen, settings)
    if settings.format == "auto" and found:
        return next(iter(found.values()))
    if settings.format in found:
        return found[settings.format]
    if seen.get("text") is not None and settings.format in ("auto", "text"):
        raise DataError(f"{name}: column 'text' should hold text, found {type(seen['text']).__name__}.")
    wanted = "no known shape" if settings.format == "auto" else f"not the shape {settings.format!r}"
    small = {column.lower(): value for column, value in seen.items()}
    known = next(iter(_found(small, settings).values()), None) if small.keys() != seen.keys() else None
    hint = f" In small letters they would be read as {known}." if known else ""
    raise DataError(
        f"{name}: its columns ({', '.join(columns) or 'none'}) have {wanted}.{hint} Name them with text_column, with "
        "prompt_column and completion_column, or with messages_column; known without naming: text; prompt + "
        "completion; instruction (+ input) + output; conversations [{from, value}]; messages [{role, content}]; chosen "
        "+ rejected; input_ids (docs/data.md has the table)"
    )


NOTHING, ODD, NUMBER, TEXTUAL, TALK = range(5)
"""Ranks of what a value says of its column, from nothing (null) and neither text nor number up to messages."""


def _seen(rows: Iterable[Mapping[str, Any]], fixed_columns: bool) -> dict[str, Any]:
    """Every column, and the value of it that says most."""
    seen: dict[str, Any] = {}
    said: dict[str, int] = {}
    for row in rows:
        for column, value in row.items():
            if (says := _says(value)) > said.get(column, -1):
                seen[column], said[column] = value, says
        if fixed_columns and all(says >= TEXTUAL for column, says in said.items() if column in KNOWN_COLUMNS):
            break
    return seen


def _says(value: Any) -> int:
    if value is None or (isinstance(value, float) and value != value):  # NaN: a table's way to leave a number out
        return NOTHING
    if isinstance(value, str):
        return TALK if _is_talk(value) else TEXTUAL
    if isinstance(value, list):
        return TALK if _is_talk(value) else ODD
    return NUMBER if is_number(value) else ODD


def _found(seen: Mapping[str, Any], settings: DataSettings) -> dict[str, Shape]:
    """The shapes that fit, in the order in which auto prefers them: first those whose values fit as well; last those
    known by their names only, whose odd values are bad rows."""
    found: dict[str, Shape] = {}
    if seen.get("input_ids") is not None:  # also one that is no list: its rows say so, and digits are not read as text
        found["tokens"] = Shape("tokens", ("input_ids",))
    named = [c for c in CONVERSATION_COLUMNS if c in seen]
    conversation = settings.messages_column or next((c for c in named if _says(seen[c]) == TALK), None)
    if conversation:
        messages = message_list(seen[conversation]) or []
        is_sharegpt = bool(messages) and "from" in messages[0] and "role" not in messages[0]
        name = "sharegpt" if is_sharegpt else "messages"
        found[name] = Shape(name, (conversation,))
    for least in (TEXTUAL, NUMBER):
        _add_pairs(found, seen, TEXTUAL, least)
    text = next((column for column in TEXT_COLUMNS if isinstance(seen.get(column), str)), None)
    if text:
        found["text"] = Shape("text", (text,))
    _add_pairs(found, seen, NOTHING, NOTHING)
    if named and not conversation:
        found.setdefault("messages", Shape("messages", (named[0],)))
    texts = [column for column, value in seen.items() if isinstance(value, str)]
    if len(texts) == 1 and not conversation:
        # A question beside columns that are not known: its answer may be one of them, so a person has to say.
        is_question = texts[0].lower() in ("instruction", *PROMPT_COLUMNS) and len(seen) > 1
        if settings.format == "text" or not is_question:
            found.setdefault("text", Shape("text", (texts[0],)))
    return found


def _add_pairs(found: dict[str, Shape], seen: Mapping[str, Any], asked: int, told: int) -> None:
    """Add what has a question and an answer, in columns whose values say at least so much."""
    fits = {least: {c for c, value in seen.items() if _says(value) >= least} for least in (asked, told)}
    if "instruction" in fits[asked] and (answer := _first(ANSWERS_TO_INSTRUCTION, fits[told])):
        found.setdefault("alpaca", Shape("alpaca", ("instruction", answer)))
    for prompt in PROMPT_COLUMNS:
        is_source = prompt == "source"
        if is_source and told < TEXTUAL:  # also the names of where a row comes from, and of its label
            continue
        completion = _first(SOURCE_PARTNERS if is_source else COMPLETION_COLUMNS, fits[told])
        if prompt in fits[asked] and completion:
            found.setdefault("prompt_completion", Shape("prompt_completion", (prompt, completion)))
    asked_numbers = any(_says(seen.get(prompt)) == NUMBER for prompt in PROMPT_COLUMNS if prompt != "source")
    if {"chosen", "rejected"} <= fits[told] and (asked < TEXTUAL or not asked_numbers):
        found.setdefault("preference", Shape("preference", ("chosen", "rejected")))


def _first(names: Iterable[str], among: set[str]) -> str | None:
    return next((name for name in names if name in among), None)


def _existing(column: str, columns: Collection[str], setting: str, name: str) -> str:
    if column not in columns:
        raise DataError(
            f"{name} has no column {column!r} ({setting}){nearest(column, columns)}; it has: "
            f"{', '.join(columns) or 'none'}"
        )
    return column


def _is_talk(value: Any) -> bool:
    """True for messages, and for a text that looks like a list of them: it is never read as plain text."""
    return message_list(value) is not None or (isinstance(value, str) and value.lstrip().startswith(("[{", "[ {")))


TEXT = Shape("text", ("text",))


def shaped_records(source: Source, settings: DataSettings) -> Iterator[tuple[Record | BadRow, Shape]]:
    """Every record with the shape of its file, whose columns are looked at first, in a reading of their own.

    Raises DataError when a file's rows have no known shape, or settings name columns of a text that has none."""
    if source.is_text:
        _check_text(source, settings)
        return ((record, TEXT) for record in source.records())
    return _by_file(source, settings)


def _by_file(source: Source, settings: DataSettings) -> Iterator[tuple[Record | BadRow, Shape]]:
    for name, group in groupby(source.records(), key=lambda record: record.where.path):
        records, fixed_columns = source.again(name)
        rows = (record.row for record in records if isinstance(record, Record))
        first = next(rows, None)
        shape = TEXT
        if first is not None:
            shape = detect_shape(chain([first], rows), settings, name, fixed_columns=fixed_columns)
        yield from ((record, shape) for record in group)


def _check_text(source: Source, settings: DataSettings) -> None:
    if settings.format not in ("auto", "text"):
        raise DataError(
            f"{source.name} is plain text, but the format is {settings.format!r}: use --data_format text or auto"
        )
    for setting in ("text_column", "prompt_column", "messages_column"):
        if (column := getattr(settings, setting)) is not None:
            raise DataError(f"{setting} is {column!r}, but {source.name} is plain text, which has no columns: drop it")
