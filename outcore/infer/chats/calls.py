"""The form of an answer that may, or must, call tools: words are free, a call that has begun is one of the tools', its
arguments by that tool's schema, in the model's own style. So no call that has ended is invalid."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outcore.apart import JSON_OPTIONS
from outcore.infer.chats.style import ALOUD, ANALYSIS, ANY, NEXT_TURN, NUMBER, CallStyle, Pairs, common

Form = dict[str, Any]
"""A form, as `response_format` has it."""
PLAIN_JSON = {
    **JSON_OPTIONS, "whitespace_flexible": False, "whitespace_pattern": None, "item_separator": ", ",
    "key_separator": ": ", "lenient": True,
}  # fmt: skip
"""JSON as templates write it: a call reads, in the next prompt, as it was written. Keywords of a schema that no form
can hold are named to the client (`Grammar.warnings`)."""
JOINED = frozenset({"$ref", "allOf", "anyOf", "if", "not", "oneOf"})
"""Keywords by which a value's schema depends on more than the value's own kind."""
MAX_LETTERS = 1 << 20
"""Rules of arguments that are written one by one: longer ones would be refused as a form, but are not built at all."""
OF_SEVERAL = JOINED | {"dependencies", "dependentRequired", "dependentSchemas", "minProperties"}
"""Keywords that arguments, where they are written one by one, cannot be held to."""


@dataclass(frozen=True)
class AskedCalls:
    """Tools of a chat and calls it asks for. `name`: of which; `is_forced`: at least one; `is_one`: at most one."""

    tools: Sequence[Mapping[str, Any]]
    is_forced: bool = False
    name: str | None = None
    is_one: bool = False


def asked_of(choice: Any, tools: Sequence[Mapping[str, Any]], *, is_one: bool) -> AskedCalls:
    """Read `tool_choice`. ValueError for an unknown choice, and for a tool that is not there."""
    if choice in ("auto", "none", None):
        return AskedCalls(tools, is_one=is_one)
    name = None
    if choice != "required":
        inner = choice.get("function", choice) if isinstance(choice, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) and choice.get("type") == "function" else None
        if not isinstance(name, str):
            raise ValueError("tool_choice must be auto, none, required, or name a function.")
        tools = [tool for tool in tools if tool["function"]["name"] == name]
    if not tools:
        raise ValueError(
            f"tool_choice asks for {'a call' if name is None else name!r}, and tools has no such function."
        )
    return AskedCalls(tools, True, name, is_one or name is not None)


class CallGrammar:
    """Lark's rules for one model's answers. `specials`: its marks that are tokens of their own, with their numbers;
    `thought`: marks around thoughts; `in_thought`: whether the prompt has begun one."""

    def __init__(
        self, style: CallStyle, specials: Mapping[str, int], thought: tuple[str, str] | None, *, in_thought: bool
    ) -> None:
        self._style, self._specials, self._in_thought = style, specials, in_thought
        # the longest that begins at a place; names are clients', so a text is gone through once
        marks = sorted((mark for mark in (*specials, ANY) if mark), key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, marks))})")
        self._letters = 0
        """Letters so far in rules of arguments that are written one by one, at most `MAX_LETTERS`."""
        self._rules = ["TEXT: /(.|\\n)*/", "SPACE: /\\n{0,2}/"]
        self._thinks = thought is not None
        if thought is not None:
            self._until("begins", thought[0].strip())
            self._until("ends", thought[1].strip())

    def form(self, asked: AskedCalls) -> Form:
        """Form of an answer as it is asked for."""
        style, several = self._style, bool(self._style.next) and not asked.is_one
        names = [f"call_{number}" for number in range(len(asked.tools))]
        for name, tool in zip(names, asked.tools, strict=True):
            self._call(name, tool["function"])
        self._rules.append(f"call: {' | '.join(names)}")
        shared = common(style.next, style.close, self._specials) if several else style.close
        more = f"({self._lit(style.next[len(shared) :])} call {self._lit(shared)})*" if several else ""
        self._rules.append(f"calls: call {self._lit(shared)} {more} {self._lit(style.close[len(shared) :])}")
        thoughts = "(begins ends)*" if self._thinks else ""
        if style.in_channels:
            start = self._in_channels(asked)
        elif asked.is_forced:
            start = f"{'ends SPACE ' * self._in_thought}{self._lit(style.open)} calls"
        else:
            if style.is_first:
                self._rules.append(f"opens[lazy]: {self._lit(style.open)}")
                called, rest = "opens calls", ""
            else:
                self._until("opens", style.trigger)
                called, rest = f"opens {self._lit(style.open[len(style.trigger) :])} calls", ""
            tail = f"({called} | {'begins TEXT | ' * self._thinks}TEXT){rest}"
            start = f"ends {thoughts} {tail} | TEXT" if self._in_thought else f"{thoughts} {tail}"
        return {"type": "grammar", "grammar": "\n".join([f"start: {start}", *self._rules])}

    def _in_channels(self, asked: AskedCalls) -> str:
        """Thoughts and words beside a call, turn by turn, then the call or the answer."""
        turns = [f"{self._lit(mark)} TEXT {self._lit(NEXT_TURN)}" for mark in (ANALYSIS, ALOUD[1])]
        answer = "" if asked.is_forced else f" | {self._lit(ALOUD[0])} TEXT"
        return f"({' | '.join(turns)})* ({self._lit(self._style.open)} calls{answer})"

    def _until(self, rule: str, mark: str) -> None:
        """A rule for any text up to a mark, which no text may hold."""
        if mark in self._specials:
            self._rules.append(f"{rule}: TEXT {self._lit(mark)}")
        elif (special := next((each for each in self._specials if mark.startswith(each)), None)) is not None:
            self._rules.append(f"{rule}: TEXT {self._lit(special)} {self._lit(mark[len(special) :])}")
        else:
            self._rules.append(f"{rule}[lazy]: TEXT {json.dumps(mark, ensure_ascii=False)}")

    def _lit(self, text: str) -> str:
        """A part of the style as Lark says it."""
        found = []
        for number, part in enumerate(self._marks.split(text)):  # every other one is a mark
            if number % 2:
                found.append(f"/{NUMBER}/" if part == ANY else f"<[{self._specials[part]}]>")
            elif part:
                found.append(json.dumps(part, ensure_ascii=False))
        return " ".join(found)

    def _call(self, rule: str, function: Mapping[str, Any]) -> None:
        name, schema = function["name"], function.get("parameters")
        schema = {"type": "object"} if schema is None else schema
        if not isinstance(schema, Mapping):
            raise ValueError(f"parameters of {name!r} must be a JSON schema.")
        head = self._lit(name + self._style.between)
        if (raw := function.get("grammar")) is not None:
            if not isinstance(raw, str):
                raise ValueError(f"grammar of {name!r} must be a text.")
            self._rules.append(f"{rule}: {head} %lark {{\n{raw}\n}}")
        elif self._style.pairs is None:
            whole = schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}
            if "properties" in schema and not (JOINED | {"patternProperties"}) & schema.keys():
                whole = {"additionalProperties": False, **whole}  # a call names the arguments that a function has
            self._rules.append(f"{rule}: {head} {_json(whole)}")
        else:
            self._rules.append(f"{rule}: {head} {self._pairs(rule, name, schema, self._style.pairs)}")

    def _pairs(self, rule: str, name: str, schema: Mapping[str, Any], style: Pairs) -> str:
        if (odd := sorted(OF_SEVERAL & schema.keys())) or not isinstance(schema.get("properties", {}), Mapping):
            words = "this model writes arguments one by one and cannot be held to that."
            raise ValueError(f"parameters of {name!r} have {', '.join(odd) or 'no properties'}: {words}")
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        required = schema.get("required")
        required = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set[str]()
        found = []
        for number, (key, value) in enumerate(schema.get("properties", {}).items()):
            value = value if isinstance(value, Mapping) else {}
            pair = f"{rule}_{number}"
            if is_text(value):
                self._text(pair, value, style.end)
                written = pair
            else:
                written = f"{_json({**value, **shared})} {self._lit(style.end)}"
            body = f"{self._lit(style.begin + key + style.is_)} {written}"
            self._letters += len(body)
            if self._letters > MAX_LETTERS:  # definitions stand once more with each argument: stop before they pile up
                raise ValueError(f"tools have arguments of more than {MAX_LETTERS} letters. Make them simpler.")
            found.append(f"({body})" if key in required else f"({body})?")
        return " ".join(found)

    def _text(self, rule: str, schema: Mapping[str, Any], end: str) -> None:
        """A text as it stands, up to what ends it."""
        chosen = [schema["const"]] if "const" in schema else schema.get("enum")
        stop = json.dumps(end, ensure_ascii=False)
        if chosen is not None:
            self._rules.append(f"{rule}: ({' | '.join(json.dumps(one, ensure_ascii=False) for one in chosen)}) {stop}")
            return
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        kinds = [f"/(.|\\n){{{least},{most}}}/"] if least or most else ["/(.|\\n)*/"]
        if (pattern := schema.get("pattern")) is not None:
            inner = pattern.replace("/", "\\/")
            front, back = "" if inner.startswith("^") else "(.|\\n)*", "" if inner.endswith("$") else "(.|\\n)*"
            kinds.append(f"/{front}({inner.removeprefix('^').removesuffix('$')}){back}/")
        self._rules.append(f"{rule.upper()}: {' & '.join(kinds)}")
        # its end is its first: a text that held what ends it would be read back shorter
        self._rules.append(f"{rule}[lazy]: {rule.upper()} {stop}")


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value of this schema is a text and nothing else."""
    chosen = [schema["const"]] if "const" in schema else schema.get("enum")
    if JOINED & schema.keys() or not isinstance(chosen, list | None):
        return False
    lengths = [schema[name] for name in ("minLength", "maxLength") if name in schema]
    if not isinstance(schema.get("pattern", ""), str) or any(type(length) is not int for length in lengths):
        return False
    if schema.get("type") == "string":
        return chosen is None or all(isinstance(one, str) for one in chosen)
    return "type" not in schema and bool(chosen) and all(isinstance(one, str) for one in chosen)


def _json(schema: Mapping[str, Any]) -> str:
    """A rule for JSON of a schema, which stands alone, so that what it refers to is found."""
    return f"%json {json.dumps({**schema, 'x-guidance': PLAIN_JSON})}"
