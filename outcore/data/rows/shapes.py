"""Shapes of rows: one table of what each is known by, what is asked, what carries loss; and how the first rows choose.

Columns named in the settings decide; otherwise the first rows' column names and the types of their values do. Every
other row must have the shape of the first: one that has not is a bad row, with the reason. A column that a shape does
not use is counted and named, never dropped without a word.

A source's rows with the shape of the file that they stand in: the files of one folder may be of different shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from outcore.data.basis import DataError, DataSettings, nearest
from outcore.data.rows import readings
from outcore.data.rows.examples import Example
from outcore.data.rows.messages import message_list
from outcore.data.sources import BadRow, Record, RowError, Source

TEXT_COLUMNS = ("text", "content", "document", "body", "raw_content", "markdown", "code")
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat")
PROMPT_COLUMNS = ("prompt", "question", "query", "problem", "input", "source")
COMPLETION_COLUMNS = ("completion", "response", "output", "solution", "answer", "target", "chosen")
"""In the order of preference: a worked solution is trained before the bare answer beside it."""
SOURCE_PARTNERS = ("target",)
"""`source` is a prompt beside these only; elsewhere it names where a row comes from."""
ANSWERS_TO_INSTRUCTION = ("output", "response", "completion", "answer")
MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
PLACEHOLDERS = ("<image>", "<audio>", "<video>", "<|image|>", "<|image_pad|>")
_CHAT_EXTRAS = ("tools", "functions", "chat_template_kwargs")


@dataclass(frozen=True)
class Kind:
    """One line of the table of shapes."""

    name: str
    known_by: str
    """The columns that make a row one of this kind, in words."""
    asked: str
    """What carries no loss."""
    loss: str
    """What carries loss."""
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
    """What the rows look like: the format's name and the columns it is read from."""

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

    def _check_media(self, row: Mapping[str, Any]) -> None:
        for column in MEDIA_COLUMNS:
            if column in self.columns or row.get(column) in (None, "", [], {}):
                continue
            texts = "" if self.format != "text" else str(row[self.columns[0]])
            if self.format != "text" or any(mark in texts for mark in PLACEHOLDERS):
                raise RowError(
                    f"column {column!r} holds media that belong to the text, and only text can be trained (drop the "
                    "column if the text stands without it)"
                )


def detect_shape(rows: Sequence[Mapping[str, Any]], settings: DataSettings, name: str) -> Shape:
    """The shape that the first rows show; DataError when a named column is missing or no shape fits."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    first = {column: next((row[column] for row in rows if row.get(column) is not None), None) for column in columns}
    if settings.text_column:
        return Shape("text", (_existing(settings.text_column, columns, "text_column", name),))
    if settings.prompt_column and settings.completion_column:
        prompt = _existing(settings.prompt_column, columns, "prompt_column", name)
        return Shape(
            "prompt_completion", (prompt, _existing(settings.completion_column, columns, "completion_column", name))
        )
    if settings.messages_column:
        _existing(settings.messages_column, columns, "messages_column", name)
    found = _found(first, columns, settings.messages_column)
    if settings.format == "auto" and found:
        return next(iter(found.values()))
    if settings.format in found:
        return found[settings.format]
    if first.get("text") is not None and settings.format in ("auto", "text"):
        raise DataError(f"{name}: column 'text' should hold text, found {type(first['text']).__name__}.")
    wanted = "no known shape" if settings.format == "auto" else f"not the shape {settings.format!r}"
    small = {column.lower(): value for column, value in first.items()}
    known = next(iter(_found(small, list(small), None).values()), None) if small.keys() != first.keys() else None
    hint = f" In small letters they would be read as {known}." if known else ""
    raise DataError(
        f"{name}: its columns ({', '.join(columns) or 'none'}) have {wanted}.{hint} Name them with text_column, with "
        "prompt_column and completion_column, or with messages_column; known without naming: text; prompt + "
        "completion; instruction (+ input) + output; conversations [{from, value}]; messages [{role, content}]; chosen "
        "+ rejected; input_ids (docs/data.md has the table)"
    )


def _found(first: Mapping[str, Any], columns: Sequence[str], messages_column: str | None) -> dict[str, Shape]:
    """The shapes that fit, in the order in which auto prefers them."""
    found: dict[str, Shape] = {}
    if first.get("input_ids") is not None:  # also one that is no list: its rows say so, and digits are not read as text
        found["tokens"] = Shape("tokens", ("input_ids",))
    conversation = messages_column or next((c for c in CONVERSATION_COLUMNS if _is_talk(first.get(c))), None)
    if conversation:
        messages = message_list(first[conversation]) or []
        is_sharegpt = bool(messages) and "from" in messages[0] and "role" not in messages[0]
        name = "sharegpt" if is_sharegpt else "messages"
        found[name] = Shape(name, (conversation,))
    answer = next((c for c in ANSWERS_TO_INSTRUCTION if isinstance(first.get(c), str)), None)
    if isinstance(first.get("instruction"), str) and answer:
        found["alpaca"] = Shape("alpaca", ("instruction", answer))
    if pair := _pair(first):
        found["prompt_completion"] = Shape("prompt_completion", pair)
    if _is_prompt(first.get("chosen")) and _is_prompt(first.get("rejected")):
        found["preference"] = Shape("preference", ("chosen", "rejected"))
    text = next((column for column in TEXT_COLUMNS if isinstance(first.get(column), str)), None)
    if text is None:
        texts = [column for column in columns if isinstance(first[column], str)]
        text = texts[0] if len(texts) == 1 and not conversation else None
    if text:
        found["text"] = Shape("text", (text,))
    return found


def _pair(first: Mapping[str, Any]) -> tuple[str, str] | None:
    for prompt in PROMPT_COLUMNS:
        if not _is_prompt(first.get(prompt)):
            continue
        partners = SOURCE_PARTNERS if prompt == "source" else COMPLETION_COLUMNS
        for completion in partners:
            if _is_prompt(first.get(completion)):
                return prompt, completion
    return None


def _existing(column: str, columns: Sequence[str], setting: str, name: str) -> str:
    if column not in columns:
        raise DataError(
            f"{name} has no column {column!r} ({setting}){nearest(column, columns)}; it has: "
            f"{', '.join(columns) or 'none'}"
        )
    return column


def _is_talk(value: Any) -> bool:
    """True for messages, and for a text that looks like a list of them: it is never read as plain text."""
    return message_list(value) is not None or (isinstance(value, str) and value.lstrip().startswith(("[{", "[ {")))


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or message_list(value) is not None


DETECT_ROWS = 16
TEXT = Shape("text", ("text",))


def shaped_records(source: Source, settings: DataSettings) -> Iterator[tuple[Record | BadRow, Shape]]:
    """Every record with the shape that the first rows of its file show.

    Raises DataError when a file's rows have no known shape, or settings name columns of a text that has none."""
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
