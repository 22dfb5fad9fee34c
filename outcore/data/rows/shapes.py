"""Shapes of rows told apart by themselves, and each turned into one of two examples: text, or a conversation.

Columns named in the settings decide; otherwise the first rows' column names and the types of their values do. Every
other row must have the shape of the first: one that has not is a bad row, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outcore.data.errors import DataError, nearest, shorten
from outcore.data.settings import DataSettings
from outcore.data.sources import RowError

TEXT_COLUMNS = ("text", "content", "document", "body", "raw_content", "markdown", "code")
PROMPT_COLUMNS = ("prompt", "question", "query", "input", "source", "problem")
COMPLETION_COLUMNS = ("completion", "response", "answer", "output", "target", "solution", "chosen")
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class TextExample:
    """Plain text, all of it trained on; or, with `prompt`, a completion after a prompt."""

    text: str
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class ChatExample:
    """Messages with `role` and `content`, for the tokenizer's chat template."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Shape:
    """What the rows look like: the format's name and the columns it is read from."""

    format: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.format} (from {', '.join(self.columns)})"

    def example(self, row: Mapping[str, Any]) -> TextExample | ChatExample:
        """One row's example. Raises RowError saying what is wrong with the row."""
        for column in self.columns:
            if column not in row:
                raise RowError(f"no column {column!r}{nearest(column, row)}; the row has: {', '.join(row) or 'none'}")
        if self.format == "text":
            return TextExample(_text(row, self.columns[0]))
        if self.format == "prompt_completion":
            return _prompt_completion(row, *self.columns)
        if self.format == "alpaca":
            return _alpaca(row)
        tools = row.get("tools")
        messages = _messages(row[self.columns[0]], self.columns[0], sharegpt=self.format == "sharegpt")
        if isinstance(row.get("system"), str) and row["system"].strip() and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": row["system"]})
        return ChatExample(messages, tools if isinstance(tools, list) and tools else None)


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
    conversation = _conversation_column(first)
    if settings.messages_column:
        conversation = _existing(settings.messages_column, columns, "messages_column", name)
    is_sharegpt = conversation is not None and _is_sharegpt(first[conversation])
    alpaca = "instruction" in first and "output" in first
    prompt = next((column for column in PROMPT_COLUMNS if _is_prompt(first.get(column))), None)
    completion = next((column for column in COMPLETION_COLUMNS if _is_prompt(first.get(column))), None)
    text = next((column for column in TEXT_COLUMNS if isinstance(first.get(column), str)), None)
    if text is None:
        texts = [column for column in columns if isinstance(first[column], str)]
        text = texts[0] if len(texts) == 1 and not conversation else None

    found: dict[str, Shape] = {}  # in the order in which auto prefers them
    if conversation and is_sharegpt:
        found["sharegpt"] = Shape("sharegpt", (conversation,))
    elif conversation:
        found["messages"] = Shape("messages", (conversation,))
    if alpaca:
        found["alpaca"] = Shape("alpaca", ("instruction", "output"))
    if prompt and completion:
        found["prompt_completion"] = Shape("prompt_completion", (prompt, completion))
    if text:
        found["text"] = Shape("text", (text,))
    if settings.format == "auto" and found:
        return next(iter(found.values()))
    if settings.format in found:
        return found[settings.format]
    wanted = "no known shape" if settings.format == "auto" else f"not the shape {settings.format!r}"
    raise DataError(
        f"{name}: its columns ({', '.join(columns) or 'none'}) have {wanted}. Name them with text_column, with "
        "prompt_column and completion_column, or with messages_column; known without naming: text; prompt + "
        f"completion; instruction (+ input) + output; conversations [{{from, value}}]; messages [{{role, content}}]"
    )


def _existing(column: str, columns: Sequence[str], setting: str, name: str) -> str:
    if column not in columns:
        raise DataError(
            f"{name} has no column {column!r} ({setting}){nearest(column, columns)}; it has: "
            f"{', '.join(columns) or 'none'}"
        )
    return column


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _is_sharegpt(value: Any) -> bool:
    return _is_message_list(value) and "from" in value[0] and "role" not in value[0]


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or _is_message_list(value)


def _conversation_column(first: Mapping[str, Any]) -> str | None:
    for column in CONVERSATION_COLUMNS:
        if _is_message_list(first.get(column)) and ({"role", "from"} & set(first[column][0])):
            return column
    return None


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        found = "nothing (null)" if value is None else f"{type(value).__name__} {shorten(repr(value), 60)}"
        raise RowError(f"column {column!r} should hold text, found {found}")
    return value


def _prompt_completion(row: Mapping[str, Any], prompt: str, completion: str) -> TextExample | ChatExample:
    if _is_message_list(row[prompt]) or _is_message_list(row[completion]):
        asked = row[prompt] if _is_message_list(row[prompt]) else [{"role": "user", "content": _text(row, prompt)}]
        told = row[completion]
        if not _is_message_list(told):
            told = [{"role": "assistant", "content": _text(row, completion)}]
        return ChatExample(_messages([*asked, *told], prompt, sharegpt=False))
    text = _text(row, completion)
    if not text.strip():
        raise RowError(f"column {completion!r} is empty: nothing to learn from")
    return TextExample(text, prompt=_text(row, prompt))


def _alpaca(row: Mapping[str, Any]) -> ChatExample:
    asked, told = _text(row, "instruction"), _text(row, "output")
    if not told.strip():
        raise RowError("column 'output' is empty: nothing to learn from")
    if row.get("input") is not None and (more := _text(row, "input").strip()):
        asked = f"{asked}\n\n{more}"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.insert(0, {"role": "system", "content": row["system"]})
    return ChatExample(messages)


def _messages(value: Any, column: str, *, sharegpt: bool) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RowError(f"column {column!r} should hold a list of messages, found {shorten(repr(value), 60)}")
    role_key, content_key = ("from", "value") if sharegpt else ("role", "content")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping):
            raise RowError(f"message {number} of {column!r} is not an object: {shorten(repr(message), 60)}")
        for key in (role_key, content_key):
            if key not in message and not (key == "content" and message.get("tool_calls")):
                raise RowError(f"message {number} of {column!r} has no {key!r}; it has: {', '.join(message)}")
        role = message[role_key]
        role = SHAREGPT_ROLES.get(str(role).lower()) if sharegpt else role
        if role not in ROLES:
            allowed = SHAREGPT_ROLES if sharegpt else ROLES
            raise RowError(
                f"message {number} of {column!r} has an unknown role {message[role_key]!r}; known: {', '.join(allowed)}"
            )
        kept = {key: item for key, item in message.items() if key not in (role_key, content_key) and item is not None}
        messages.append({**kept, "role": role, "content": _content(message.get(content_key), number, column)})
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError(f"column {column!r} has no assistant message: nothing to learn from")
    return messages


def _content(value: Any, number: int, column: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = []
        for part in value:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise RowError(f"message {number} of {column!r} has a part that is not text: {shorten(repr(part), 60)}")
            parts.append(part["text"])
        return "".join(parts)
    raise RowError(f"the content of message {number} of {column!r} should be text, found {type(value).__name__}")
