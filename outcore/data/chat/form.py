"""The form in which a chat template reads messages: text or parts, tool arguments as objects or as JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Form:
    """How one template wants its messages."""

    parts: bool = False
    """True: content as a list of parts, as templates of vision models read it."""
    calls_as_text: bool = False
    """True: tool arguments as JSON text, for templates that only join texts."""

    def prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages in this form."""
        return [self._prepared(message) for message in messages]

    def _prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        ready = {key: value for key, value in message.items() if value is not None}
        reasoning = next((ready[key] for key in ("reasoning_content", "thinking", "reasoning") if key in ready), None)
        if reasoning is not None:  # as transformers does: templates read one name or the other
            ready = {"thinking": reasoning, **ready, "reasoning_content": reasoning}
        if self.parts and isinstance(ready.get("content"), str):
            ready["content"] = [{"type": "text", "text": ready["content"]}]
        if calls := ready.get("tool_calls"):
            ready["tool_calls"] = [_with_arguments(call, as_text=self.calls_as_text) for call in calls]
        return ready


def _with_arguments(call: Any, *, as_text: bool) -> Any:
    """A tool call with its arguments as an object, or as JSON text for templates that only join texts."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _with_arguments(function, as_text=as_text)}
    arguments = call.get("arguments")
    if isinstance(arguments, str) and not as_text:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
        return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
    if as_text and arguments is not None and not isinstance(arguments, str):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return call
