"""Parts of a conversation that a chat template does not write: named and counted, or refused if words would be lost."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from outcore.data.basis import shorten
from outcore.data.chat.marks import Rendering
from outcore.data.rows import ChatExample
from outcore.data.sources import RowError

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
KNOWN_KEYS = {"role", "content", "id", "tool_call_id", *REASONING_KEYS}
"""Keys that are looked at here, or that only number messages and calls."""
_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_NO_WORDS = re.compile(r"[\W_]+")


def notices_of(example: ChatExample, rendering: Rendering, read: frozenset[str]) -> list[str]:
    """Sentences that are the same for every conversation, so that they can be counted.

    `read` are the words of the template's source. Raises RowError when words or a tool call would be missing from what
    is trained."""
    text, notices = rendering.text, []
    messages = example.messages
    check_calls(example, rendering)
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for i, message in enumerate(messages):
        content, role = str(message["content"]), message["role"]
        thought = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
        if role == "assistant" and thought is None and (inside := _THINKING.search(content)):
            thought = inside[1]
        words = content.rpartition("</think>")[2] if role == "assistant" else content
        if not _is_written(words, text) and message.get("tool_calls"):
            notices.append("words beside a tool call are not written by the chat template")
        elif not _is_written(words, text):
            raise RowError(f"the chat template leaves out what message {i + 1} ({role}) says: {shorten(words, 60)!r}")
        if thought and not _is_written(str(thought), text):
            which = "the last answer" if i > last_user else "earlier answers"
            notices.append(f"reasoning of {which} is not written by the chat template")
        unread = [key for key in message if key not in KNOWN_KEYS and key not in read]
        notices += [f"message key {key!r} is not read by the chat template" for key in unread]
    if example.tools and not any(_tool_name(tool) in text for tool in example.tools):
        notices.append("'tools' is not written by the chat template")
    unread = [key for key in example.variables if key not in read]
    notices += [f"chat_template_kwargs key {key!r} is not read by the chat template" for key in unread]
    return notices


def check_calls(example: ChatExample, rendering: Rendering) -> None:
    """RowError for a tool call that the template does not write."""
    for i, message in enumerate(example.messages):
        written = [rendering.text[piece.start : piece.end] for piece in rendering.of(i)]
        for call in message.get("tool_calls") or ():
            name = str((call.get("function") or call).get("name"))
            if not any(name in part for part in written):
                raise RowError(f"the chat template does not write the tool call {name!r} of message {i + 1}")


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _is_written(words: str, text: str) -> bool:
    """True when the words stand in the text, also as JSON or with other white space."""
    words = words.strip()
    if words in text or json.dumps(words, ensure_ascii=False)[1:-1] in text:
        return True
    return _NO_WORDS.sub("", words)[:400] in _NO_WORDS.sub("", text)
