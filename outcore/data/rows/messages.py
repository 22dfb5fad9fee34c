"""Lists of messages as people store them (OpenAI, ShareGPT, JSON text in a cell), brought to one form.

Out comes `role` and `content` (text), tool calls as OpenAI writes them, and which assistant messages the row itself
keeps out of the loss (`weight: 0`, `train: false`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from outcore.data.basis import shorten
from outcore.data.sources import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
LOSS_KEYS = ("weight", "train", "training")
"""Keys of a message that say whether it is trained: OpenAI's and ShareGPT's weight, axolotl's train."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names that templates and data give to what a model thinks before it answers."""


def message_list(value: Any) -> list[Any] | None:
    """The value if it is a list of messages, also as JSON text in a cell; None when it is something else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return value if {"role", "from"} & set(value[0]) else None
    return None


def is_number(value: Any) -> bool:
    """True for a number or a boolean, which an answer may be; not for a table's NaN, which says that there is none."""
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def as_text(value: Any) -> Any:
    """A number or a boolean as JSON spells it; anything else as it is."""
    return json.dumps(value) if is_number(value) else value


def read_messages(value: Any, column: str) -> tuple[list[dict[str, Any]], frozenset[int]]:
    """(messages, numbers of the assistant messages without loss). Raises RowError saying what is wrong."""
    if isinstance(value, str) and (parsed := message_list(value)) is not None:
        value = parsed
    if not isinstance(value, list) or not value:
        hint = " (as JSON: Python's own way to write a list is not read)" if str(value).startswith("[{'") else ""
        raise RowError(f"column {column!r} should hold a list of messages{hint}, found {shorten(repr(value), 60)}")
    messages, untrained = [], set()
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise RowError(f"message {number + 1} of {column!r} is not an object: {shorten(repr(message), 60)}")
        read = _message(message, f"message {number + 1} of {column!r}")
        if not _is_trained(message, read["role"], f"message {number + 1} of {column!r}"):
            untrained.add(number)
        messages.append(read)
    return messages, frozenset(untrained)


def says_something(message: Mapping[str, Any]) -> bool:
    """True for an assistant's message with words, reasoning or a tool call: one that a model can learn from."""
    said = (message.get(key) for key in ("content", *REASONING_KEYS))
    return message["role"] == "assistant" and (
        bool(message.get("tool_calls")) or any(str(words).strip() for words in said if words is not None)
    )


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role_key = "role" if "role" in message else "from"
    content_key = "content" if "content" in message or "value" not in message else "value"
    if role_key not in message:
        raise RowError(f"{where} has no 'role'; it has: {', '.join(message)}")
    if content_key not in message and not (message.get("tool_calls") or message.get("function_call")):
        wanted = "value" if role_key == "from" else "content"
        raise RowError(f"{where} has no {wanted!r}; it has: {', '.join(message)}")
    named = str(message[role_key])
    role = named if named in ROLES else OTHER_ROLES.get(named.lower(), named.lower())
    if role not in ROLES:
        known = ", ".join((*ROLES, *OTHER_ROLES))
        raise RowError(f"{where} has an unknown role {message[role_key]!r}; known: {known}")
    dropped = (role_key, content_key, "function_call", *LOSS_KEYS)
    kept = {key: item for key, item in message.items() if key not in dropped and item not in (None, [], {})}
    content = _content(message.get(content_key), where)
    calls = message.get("function_call")
    if named.lower() in ("function_call", "tool_call"):
        calls, content = content, ""
    if calls:
        kept["tool_calls"] = [*kept.get("tool_calls", ()), *_calls(calls, where)]
    return {**kept, "role": role, "content": content}


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Calls in the older forms: one object or several, also as JSON text, without the `function` around them."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"{where} should hold a function call as JSON, found {shorten(value, 60)!r}") from error
    calls = value if isinstance(value, list) else [value]
    found = []
    for call in calls:
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
            found.append(dict(call))
        elif isinstance(call, Mapping) and isinstance(call.get("name"), str):
            found.append({"type": "function", "function": dict(call)})
        else:
            raise RowError(f"{where} has a function call without a name: {shorten(repr(call), 60)}")
    return found


def _is_trained(message: Mapping[str, Any], role: str, where: str) -> bool:
    trained = True
    for key in LOSS_KEYS:
        value = message.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise RowError(f"{where} has {key} {value!r}; only 0 (no loss) and 1 (loss) can be trained")
        if key != "weight" and value and role != "assistant":
            raise RowError(f"{where} asks to train on a {role} message ({key}); only assistant messages can carry loss")
        trained = trained and bool(value)
    return trained


def _content(value: Any, where: str) -> str:
    value = "" if value is None else as_text(value)
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = []
        for part in value:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise RowError(f"{where} has a part that is not text: {shorten(repr(part), 60)}")
            parts.append(part["text"])
        return "".join(parts)
    raise RowError(f"the content of {where} should be text, found {type(value).__name__}")


def read_tools(row: Mapping[str, Any]) -> list[Any] | None:
    """The row's `tools`, or OpenAI's older `functions`, also as JSON text; None without any."""
    for column in ("tools", "functions"):
        value = row.get(column)
        if isinstance(value, str) and value.strip():
            value = _json(value, column)
        if value in (None, "", [], {}):
            continue
        tools = [value] if isinstance(value, Mapping) else value
        if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
            raise RowError(f"column {column!r} should hold a list of tools, found {shorten(repr(value), 60)}")
        if column == "functions":
            tools = [tool if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]
        return [dict(tool) for tool in tools]
    return None


def read_variables(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's `chat_template_kwargs`, also as JSON text."""
    value = row.get("chat_template_kwargs")
    if isinstance(value, str) and value.strip():
        value = _json(value, "chat_template_kwargs")
    if value in (None, "", {}):
        return {}
    if not isinstance(value, Mapping):
        raise RowError(f"column 'chat_template_kwargs' should hold an object, found {shorten(repr(value), 60)}")
    reserved = {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"} & set(value)
    if reserved:
        raise RowError(f"column 'chat_template_kwargs' may not set {', '.join(sorted(reserved))}")
    return dict(value)


def _json(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowError(f"column {column!r} should hold JSON, found {shorten(text, 60)!r}") from error
