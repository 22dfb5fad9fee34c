"""Calls that an answer must make: `tool_choice` as a form, each call between the marks that answers are read by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outcore.apart import JSON_OPTIONS
from outcore.infer.chats.parsing import MARKS

Forced = dict[str, Any]
"""A form, as `response_format` has it."""
COMBINED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties"})
"""Parts of a schema by which it may have more properties than it names itself."""
THOUGHT = f"/[^<]*/ {json.dumps(MARKS['reasoning'][1])} /\\n{{0,2}}/ "
"""What is thought before the call where the prompt has begun a thought; without "<", so that its end is its end."""


def forced_of(choice: Any, tools: Sequence[Mapping[str, Any]], *, is_one: bool, begins_in_thought: bool) -> Forced:
    """The form of an answer that calls any tool (`required`), or the one that is named. `is_one`: a single call.
    ValueError for another choice, and for a tool that is not there."""
    functions = [tool["function"] for tool in tools]
    name = None
    if choice != "required":
        inner = choice.get("function", choice) if isinstance(choice, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) and choice.get("type") == "function" else None
        if not isinstance(name, str):
            raise ValueError("tool_choice must be auto, none, required, or name a function.")
        functions = [function for function in functions if function["name"] == name]
    if not functions:
        raise ValueError(
            f"tool_choice asks for {'a call' if name is None else name!r}, and tools has no such function."
        )
    call = "call" if is_one or name is not None else r"call (/\n/ call)*"
    rules = [f"start: {THOUGHT if begins_in_thought else ''}{call}", f"call: {' | '.join(map(_call, functions))}"]
    return {"type": "grammar", "grammar": "\n".join(rules)}


def _call(function: Mapping[str, Any]) -> str:
    """A rule of Lark for one function's call. Its schema stands alone, so that what it refers to is found."""
    schema = function.get("parameters") or {"type": "object"}
    if not isinstance(schema, Mapping):
        raise ValueError(f"parameters of {function['name']!r} must be a JSON schema.")
    if "properties" in schema and not COMBINED & schema.keys():  # a call names the arguments that a function has
        schema = {"type": "object", "additionalProperties": False, **schema}
    begin, end = MARKS["tool"]
    opening = f'{begin}\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
    written = json.dumps({**schema, "x-guidance": dict(JSON_OPTIONS)})
    return f"{json.dumps(opening, ensure_ascii=False)} %json {written} {json.dumps('}' + chr(10) + end)}"
