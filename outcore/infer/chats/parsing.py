"""What an answer holds besides words: reasoning and calls of tools, told apart while it arrives; log-probabilities.

Marks are those that most open models write: <think>...</think>, and <tool_call>{"name": ..., "arguments": {...}}
</tool_call>. Only marks that the model's own chat template names are looked for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from outcore.common.files import json_of

Mode = Literal["content", "reasoning", "tool"]
MARKS: dict[Mode, tuple[str, str]] = {"reasoning": ("<think>", "</think>"), "tool": ("<tool_call>", "</tool_call>")}


REASONING = ("reasoning_content", "thinking")
"""What templates call the part that is not said aloud."""


@dataclass
class Parsed:
    """One answer, told apart."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    most_calls: int | None = None
    """Calls of tools that are told; what the model writes beyond them is left out."""

    def take(self, new: Parsed) -> Parsed:
        """Add what is new; returns it."""
        if self.most_calls is not None:
            del new.tool_calls[max(0, self.most_calls - len(self.tool_calls)) :]
        self.content += new.content
        self.reasoning += new.reasoning
        self.tool_calls += new.tool_calls
        return new

    def fields(self) -> dict[str, Any]:
        """The parts that are there, by their names in a message."""
        named = {"content": self.content, "reasoning_content": self.reasoning, "tool_calls": self.tool_calls}
        return {name: part for name, part in named.items() if part}

    def message(self) -> dict[str, Any]:
        """The whole answer as a message."""
        content = None if self.tool_calls else ""
        return {"role": "assistant", "content": content, **self.fields()}

    def finish(self, finish: str) -> str:
        """Why it ended, where the model's own end may be a call."""
        return "tool_calls" if self.tool_calls and finish == "stop" else finish


class AnswerParser:
    """`add` text, `finish` once; each returns what is new. `marks`: which to look for; `begins_in`: what the prompt has
    already opened."""

    def __init__(self, name: str, marks: frozenset[Mode], begins_in: Mode = "content") -> None:
        self.whole = Parsed()
        self._name, self._marks = name, marks
        self._mode: Mode = begins_in
        self._held, self._tool = "", ""
        self._skips_lines = False
        """Whether what comes next is behind a closing mark, whose line breaks are no part of what is said."""

    def add(self, text: str) -> Parsed:
        """What more text settles."""
        self._held += text
        new = Parsed()
        while self._step(new):
            pass
        return self.whole.take(new)

    def finish(self) -> Parsed:
        """The rest."""
        new = Parsed()
        if self._mode == "tool":  # cut off within a call: it is told as text
            self._put(new, MARKS["tool"][0] + self._tool + self._held, "content")
        else:
            self._put(new, self._held, self._mode)
        self._held = self._tool = ""
        return self.whole.take(new)

    def _step(self, new: Parsed) -> bool:
        """Settle text up to the next mark; False when there is none yet."""
        if self._skips_lines and self._held:
            self._held = self._held.lstrip("\n")
            self._skips_lines = not self._held
        begins: dict[str, Mode] = {MARKS[self._mode][1]: "content"} if self._mode != "content" else {}
        if self._mode == "content":
            begins = {MARKS[mode][0]: mode for mode in self._marks}
        found = min(((self._held.find(mark), mark) for mark in begins if mark in self._held), default=None)
        if found is None:
            keep = max((_overlap(self._held, mark) for mark in begins), default=0)
            self._put(new, self._held[: len(self._held) - keep], self._mode)
            self._held = self._held[len(self._held) - keep :]
            return False
        at, mark = found
        self._put(new, self._held[:at], self._mode)
        self._held, self._skips_lines = self._held[at + len(mark) :], self._mode != "content"
        if self._mode == "tool":
            self._end_tool(new)
        self._mode = begins[mark]
        return True

    def _put(self, new: Parsed, text: str, mode: Mode) -> None:
        if mode == "content":
            new.content += text
        elif mode == "reasoning":
            new.reasoning += text
        else:
            self._tool += text

    def _end_tool(self, new: Parsed) -> None:
        text, self._tool = self._tool.strip(), ""
        call = tool_call_of(text, f"{self._name}-{len(self.whole.tool_calls) + len(new.tool_calls)}")
        if call is None:
            new.content += f"{MARKS['tool'][0]}{text}{MARKS['tool'][1]}"
        else:
            new.tool_calls.append(call)


class TemplateParser:
    """Parser like `AnswerParser`, for a tokenizer that says itself how its answers are written (`response_template`):
    read by transformers' own parser, special marks included. `prompt`: what the answer goes on from."""

    def __init__(self, name: str, template: Any, prompt: str, tools: list[Any]) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self.whole = Parsed()
        self._name = name
        self._parser = ResponseParser(template, prefix=prompt, tools=tools)
        self._unfinished = ""
        """Text of a part that is told only once it is whole."""
        self._is_lost = False

    def add(self, text: str) -> Parsed:
        """What more text settles. Behind a part that is not written as it should be all is text."""
        try:
            return self.whole.take(Parsed(text)) if self._is_lost else self._told(self._parser.feed(text))
        except ValueError:
            self._is_lost = True
            return self.whole.take(Parsed(self._unfinished + text))

    def finish(self) -> Parsed:
        """The rest; a call that was cut off is told as text."""
        if self._is_lost:
            return Parsed()
        try:
            return self._told(self._parser.finalize()[1])
        except ValueError:
            return self.whole.take(Parsed(content=self._unfinished))

    def _told(self, events: list[dict[str, Any]]) -> Parsed:
        new = Parsed()
        for event in events:
            kind, part = event["type"], event.get("field")
            if kind == "region_chunk" and event.get("dirty"):
                self._unfinished += event.get("text") or ""
            elif kind == "region_chunk" and part == "content":
                new.content += event.get("text") or ""
            elif kind == "region_chunk" and part in REASONING:
                new.reasoning += event.get("text") or ""
            elif kind == "region_close":
                if part == "tool_calls":
                    calls = self._calls(event.get("value"), len(new.tool_calls))
                    new.tool_calls += calls
                    new.content += "" if calls else self._unfinished
                self._unfinished = ""
        return self.whole.take(new)

    def _calls(self, value: Any, before: int) -> list[dict[str, Any]]:
        found = []
        for one in value if isinstance(value, list) else [value]:
            function = one.get("function", one) if isinstance(one, dict) else None
            name = f"{self._name}-{len(self.whole.tool_calls) + before + len(found)}"
            call = tool_call_of(json.dumps(function), name)
            if call is not None:
                found.append(call)
        return found


def tool_call_of(text: str, name: str) -> dict[str, Any] | None:
    """A call in OpenAI's shape; None when the text is none."""
    try:
        call = json_of(text)
        function, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(function, str):
        return None
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call-{name}", "type": "function", "function": {"name": function, "arguments": written}}


def marks_of(tokenizer: Any, *, with_tools: bool) -> frozenset[Mode]:
    """Which marks this model's template speaks of."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    found: set[Mode] = set()
    if "</think>" in template:
        found.add("reasoning")
    if with_tools:
        found.add("tool")
    return frozenset(found)


def takes_tools(tokenizer: Any) -> bool:
    """Whether the model's template tells it of tools."""
    return "tools" in str(getattr(tokenizer, "chat_template", None) or "")


def _overlap(text: str, mark: str) -> int:
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
