"""Parser of an answer: words, reasoning and calls of tools, told apart while it arrives.

Marks are those of the model's own style (`style`): a call's name is told as soon as it is written, its arguments piece
by piece. What only looks like a call is text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outcore.common.files import json_of
from outcore.infer.chats.calls import is_text
from outcore.infer.chats.style import ALOUD, ANALYSIS, ANY, NEXT_TURN, NUMBER, CallStyle, Pairs

Mode = Literal["content", "reasoning", "head", "arguments", "raw", "pairs", "tail"]
_BLANKS = re.compile(r"\s+|(?<=\{)(?=\")|(?<=\})(?=<)")
REASONING = ("reasoning_content", "thinking")
"""Names that templates have for the part that is not said aloud."""


@dataclass
class Parsed:
    """One answer, told apart, or what of it is new: there a call has an `index`, and arguments go on."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False
    """Whether the answer ended within its last call."""

    def take(self, new: Parsed) -> Parsed:
        """Add what is new; returns it."""
        self.content += new.content
        self.reasoning += new.reasoning
        for delta in new.tool_calls:
            if "id" in delta:
                call = {key: value for key, value in delta.items() if key != "index"}
                self.tool_calls.append(call | {"function": dict(delta["function"])})
            else:
                self.tool_calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
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


@dataclass(frozen=True)
class Reads:
    """Rules by which a parser reads. `thought`: marks around thoughts; `style`: form of calls; None: not looked for."""

    thought: tuple[str, str] | None = None
    style: CallStyle | None = None
    begins_in: Mode = "content"
    """Part of the answer that the prompt has already opened."""
    most_calls: int | None = None
    """Calls beyond these are left out."""
    raw: frozenset[str] = frozenset()
    """Tools whose input is a text of their own grammar."""
    properties: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of arguments by tool, to know texts from other values where arguments are written one by one."""


class AnswerParser:
    """`add` text, `finish` once; each returns what is new. `name`: what calls are told apart by."""

    def __init__(self, name: str, reads: Reads) -> None:
        self.whole, self._name, self._reads = Parsed(), name, reads
        self._mode: Mode = reads.begins_in
        self._held, self._count, self._is_left_out = "", 0, False
        self._depth, self._in_text, self._is_escaped = 0, False, False
        """Depth of nesting in a call's JSON, whether within a string of it, and whether behind a backslash there."""
        self._skips_lines = False
        """Whether what comes next is behind a closing mark, whose line breaks are no part of what is said."""
        self._begins: dict[str, Mode] = {}
        if reads.thought is not None:
            self._begins[reads.thought[0].strip()] = "reasoning"
            if reads.thought[0] == ANALYSIS:
                self._begins |= dict.fromkeys((*ALOUD, NEXT_TURN, NEXT_TURN.removeprefix(reads.thought[1])), "content")
        if (style := reads.style) is not None:
            self._begins |= {} if style.is_first else {style.trigger: "head"}
            named = r"(?P<name>[\w.:/$-]+?)" + _loose(style.between, style)
            self._head = re.compile(_loose(style.open[len(style.trigger) :], style) + named)
            self._next = re.compile(_loose(style.next, style) + named) if style.next else None
            self._close = re.compile(_loose(style.close, style))

    def add(self, text: str) -> Parsed:
        """Take more text in; returns the parts that it settles."""
        self._held += text
        new = Parsed()
        while self._step(new):
            pass
        return self.whole.take(new)

    def finish(self) -> Parsed:
        """The rest; a call that is not named yet is told as text."""
        new = Parsed()
        if self._mode == "head":
            self._put(new, self._style.trigger + self._held, "content")
        elif self._mode in ("content", "reasoning"):
            self._put(new, self._held, self._mode)
        else:
            self.whole.is_cut = self._mode != "tail" and not self._is_left_out
        self._held = ""
        return self.whole.take(new)

    @property
    def _style(self) -> CallStyle:
        assert self._reads.style is not None
        return self._reads.style

    def _step(self, new: Parsed) -> bool:
        """Settle what can be; False when more text is needed."""
        match self._mode:
            case "content" | "reasoning":
                return self._words(new)
            case "head":
                return self._heading(new)
            case "arguments":
                return self._json(new)
            case "raw":
                return self._raw(new)
            case "pairs":
                return self._pair(new, self._style.pairs)
            case "tail":
                return self._tail(new)

    def _words(self, new: Parsed) -> bool:
        """Settle text up to the next mark."""
        if self._skips_lines and self._held:
            self._held = self._held.lstrip("\n")
            self._skips_lines = not self._held
        begins = self._begins
        if self._mode == "reasoning":
            assert self._reads.thought is not None
            begins = dict[str, Mode]({self._reads.thought[1].strip(): "content"})
        elif self._reads.style is not None and self._style.is_first and not (self.whole.content + new.content).strip():
            begins = dict[str, Mode]({**begins, self._style.trigger: "head"})
        found = min(((self._held.find(mark), mark) for mark in begins if mark in self._held), default=None)
        if found is None:
            keep = max((_overlap(self._held, mark) for mark in begins), default=0)
            self._put(new, self._held[: len(self._held) - keep], self._mode)
            self._held = self._held[len(self._held) - keep :]
            return False
        at, mark = found
        self._put(new, self._held[:at], self._mode)
        self._held, self._skips_lines = self._held[at + len(mark) :], self._mode != "content"
        self._mode = begins[mark]
        return True

    def _put(self, new: Parsed, text: str, mode: Mode) -> None:
        if mode == "content":
            new.content += text
        else:
            new.reasoning += text

    def _heading(self, new: Parsed) -> bool:
        if (match := self._head.match(self._held)) is not None and self._begin(new, match):
            return True
        end = self._style.end_mark
        if not end or end not in self._held:
            return False
        text, _, self._held = self._held.partition(end)  # not in the model's style: whole, or no call
        call = tool_call_of(text.strip(), f"{self._name}-{self._count}")
        if call is None:
            new.content += self._style.trigger + text + end
        elif self._count != self._reads.most_calls:
            new.tool_calls.append({"index": self._count, **call})
            self._count += 1
        self._mode, self._skips_lines = "content", True
        return True

    def _begin(self, new: Parsed, match: re.Match[str]) -> bool:
        """Tell of a call whose name has come; False when what follows is no arguments."""
        name, rest = match["name"], self._held[match.end() :]
        mode: Mode = "pairs" if self._style.pairs else "raw" if name in self._reads.raw else "arguments"
        if mode == "arguments":
            rest = rest.lstrip()
            if not rest.startswith("{"):
                return False
        elif mode == "raw":  # the text begins behind the style's own blanks: more of them are the text's
            blanks = self._style.between[len(self._style.between.rstrip()) :]
            behind = self._held[match.start() + len(match[0].rstrip()) :]
            if len(behind) < len(blanks) and blanks.startswith(behind):
                return False
            rest = behind.removeprefix(blanks)
        self._held, self._mode = rest, mode
        self._is_left_out = self._count == self._reads.most_calls
        self._called, self._depth = name, 0
        if not self._is_left_out:
            function = {"name": name, "arguments": ""}
            call = {"index": self._count, "id": f"call-{self._name}-{self._count}", "type": "function"}
            new.tool_calls.append(call | {"function": function})
            self._count += 1
        return True

    def _argue(self, new: Parsed, text: str) -> None:
        """Tell more of the arguments."""
        if text and not self._is_left_out:
            new.tool_calls.append({"index": self._count - 1, "function": {"arguments": text}})

    def _json(self, new: Parsed) -> bool:
        for at, letter in enumerate(self._held):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_text:
                self._is_escaped, self._in_text = letter == "\\", letter != '"'
            elif letter == '"':
                self._in_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self._argue(new, self._held[: at + 1])
                    self._held, self._mode = self._held[at + 1 :], "tail"
                    return True
        self._argue(new, self._held)
        self._held = ""
        return False

    def _raw(self, new: Parsed) -> bool:
        ends = [mark for mark in (self._style.close, self._style.next) if mark]
        at = min((self._held.find(end) for end in ends if end in self._held), default=-1)
        if at >= 0:
            self._argue(new, self._held[:at])
            self._held, self._mode = self._held[at:], "tail"
            return True
        keep = max((_overlap(self._held, end) for end in ends), default=0)
        self._argue(new, self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _pair(self, new: Parsed, pairs: Pairs | None) -> bool:
        assert pairs is not None
        if self._held.startswith(pairs.begin):
            key, is_, rest = self._held[len(pairs.begin) :].partition(pairs.is_)
            value, end, rest = rest.partition(pairs.end)
            if not is_ or not end:
                return False
            self._argue(new, ("{" if not self._depth else ", ") + json.dumps(key) + ": " + self._value_of(key, value))
            self._held, self._depth = rest, 1
            return True
        if len(self._held) < len(pairs.begin) and pairs.begin.startswith(self._held):
            return False
        self._argue(new, "}" if self._depth else "{}")
        self._mode = "tail"
        return True

    def _value_of(self, key: str, value: str) -> str:
        schema = self._reads.properties.get(self._called, {}).get(key)
        if not (isinstance(schema, Mapping) and is_text(schema)):
            try:
                return json.dumps(json_of(value), ensure_ascii=False)
            except ValueError:
                pass
        return json.dumps(value, ensure_ascii=False)

    def _tail(self, new: Parsed) -> bool:
        """Read on behind a call: another one, or the end of calls."""
        if match := self._close.match(self._held):
            self._held, self._mode, self._skips_lines = self._held[match.end() :], "content", True
            return True
        if self._next is not None and (match := self._next.match(self._held)) and self._begin(new, match):
            return True
        if len(self._held) > len(self._style.close) + len(self._style.next) + 200:  # neither: words behind a call
            self._mode = "content"
            return True
        return False


def _loose(text: str, style: CallStyle) -> str:
    """A part of the style as a pattern. In JSON's there may be any blanks where it has some."""
    if style.pairs is not None:
        return f"(?:{NUMBER})".join(map(re.escape, text.split(ANY)))
    parts = [r"\s*".join(map(re.escape, _BLANKS.split(part))) for part in text.split(ANY)]
    # two such in a row would try every way to share the blanks between them, quadratic in their number
    return re.sub(r"(?:\\s\*){2,}", lambda _: r"\s*", r"\s*" + f"(?:{NUMBER})".join(parts))


class TemplateParser:
    """Parser like `AnswerParser`, for a tokenizer that says itself how its answers are written (`response_template`):
    read by transformers' own parser, special marks included. `prompt`: what the answer goes on from."""

    def __init__(self, name: str, template: Any, prompt: str, tools: list[Any], most_calls: int | None = None) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self.whole, self._most_calls = Parsed(), float("inf") if most_calls is None else most_calls
        self._name = name
        self._parser = ResponseParser(template, prefix=prompt, tools=tools)
        self._unfinished = ""
        """Text of a part that is told only once it is whole."""
        self._is_lost = False

    def add(self, text: str) -> Parsed:
        """Take more text in; returns what it settles. Behind a part that is not written as it should be all is text."""
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
                    new.tool_calls += [call for call in calls if call["index"] < self._most_calls]
                    new.content += "" if calls else self._unfinished
                self._unfinished = ""
        return self.whole.take(new)

    def _calls(self, value: Any, before: int) -> list[dict[str, Any]]:
        found = []
        for one in value if isinstance(value, list) else [value]:
            function = one.get("function", one) if isinstance(one, dict) else None
            count = len(self.whole.tool_calls) + before + len(found)
            call = tool_call_of(json.dumps(function), f"{self._name}-{count}")
            if call is not None:
                found.append({"index": count, **call})
        return found


def tool_call_of(text: str, name: str) -> dict[str, Any] | None:
    """A call in OpenAI's shape; None when the text is none."""
    try:
        call = json_of(text)
        function, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        json_of(arguments or "{}") if isinstance(arguments, str) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(function, str):
        return None
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call-{name}", "type": "function", "function": {"name": function, "arguments": written}}


def takes_tools(tokenizer: Any) -> bool:
    """Whether the model's template tells it of tools."""
    return "tools" in str(getattr(tokenizer, "chat_template", None) or "")


def _overlap(text: str, mark: str) -> int:
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
