"""Wire traffic of three coding agents over thirty turns, as their protocols publish it, built here.

Each request is what the client would send: the whole conversation so far, its tools,
its system prompt. What the model said before is recorded, so the traffic is the same whatever the model says now."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TURNS = 30
FOX = "The quick brown fox jumps over the lazy dog. "
READ = {
    "type": "object",
    "properties": {"path": {"type": "string", "enum": ["a.py", "b.py"]}, "limit": {"type": "integer", "maximum": 9}},
    "required": ["path"],
    "additionalProperties": False,
}
RUN = {
    "type": "object",
    "properties": {"command": {"type": "string", "maxLength": 12}},
    "required": ["command"],
    "additionalProperties": False,
}
SCHEMAS = {"Read": READ, "Bash": RUN}
PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /[a-z]{1,4}/
add_line: "+" /[a-z]{0,8}/ LF -> line
%import common.LF
"""


@dataclass(frozen=True)
class Sent:
    """One request. `calls`: whether the client insists on a call of a tool."""

    body: dict[str, Any]
    turn: int
    calls: bool = False


def claude() -> Iterator[Sent]:
    """Messages: a header in the system prompt that changes with every request, cache marks, thoughts sent back,
    titles without tools in between."""
    draw, messages = random.Random(1), []
    tools = [
        {"name": name, "description": FOX, "input_schema": schema, "cache_control": {"type": "ephemeral"}}
        for name, schema in SCHEMAS.items()
    ]
    tools.append({"type": "web_search_20250305", "name": "web_search", "max_uses": 8})

    def body(**more: Any) -> dict[str, Any]:
        header = f"x-anthropic-billing-header: cc_version=2.1.{draw.random()}; cch={draw.getrandbits(20):05x};"
        rules = {"type": "text", "text": FOX * 260, "cache_control": {"type": "ephemeral"}}
        system = [{"type": "text", "text": header}, rules]
        return {"model": "tiny", "max_tokens": 32000, "system": system, "tools": tools, "messages": [*messages], **more}

    for turn in range(TURNS):
        messages.append({"role": "user", "content": [{"type": "text", "text": f"{FOX}{turn}"}]})
        calls = turn % 5 == 0
        yield Sent(body(**({"tool_choice": {"type": "any"}} if calls else {})), turn, calls)
        call = {"type": "tool_use", "id": f"toolu_{turn:02}", "name": "Read", "input": {"path": "a.py", "limit": 3}}
        thought = {"type": "thinking", "thinking": FOX, "signature": "outcore"}
        messages.append({"role": "assistant", "content": [thought, {"type": "text", "text": "So."}, call]})
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": FOX * 2}]}
        messages.append(
            {"role": "user", "content": [result, {"type": "text", "text": "<system-reminder>x</system-reminder>"}]}
        )
        yield Sent(body(thinking={"type": "disabled"}), turn)
        messages.append({"role": "assistant", "content": [{"type": "text", "text": FOX}]})
        if turn % 6 == 0:
            title = [{"role": "user", "content": f"{FOX}{draw.random()}"}]
            yield Sent({"model": "tiny", "max_tokens": 32, "system": "Title it.", "messages": title}, turn)


def codex() -> Iterator[Sent]:
    """Responses without a store: a namespace, a free-form patch, tools of OpenAI's own, reasoning items."""
    items: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": name, "description": FOX, "strict": False, "parameters": schema}
        for name, schema in SCHEMAS.items()
    ]
    inner = {"type": "function", "name": "look", "description": "x", "strict": True, "parameters": READ}
    tools += [
        {"type": "custom", "name": "apply_patch", "description": "Patch.",
         "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}},
        {"type": "namespace", "name": "mcp__files", "description": "Files", "tools": [inner]},
        {"type": "web_search", "external_web_access": False},
    ]  # fmt: skip

    def body(**more: Any) -> dict[str, Any]:
        return {
            "model": "tiny", "instructions": FOX * 260, "input": [*items], "tools": tools, "tool_choice": "auto",
            "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
            "include": ["reasoning.encrypted_content"], "prompt_cache_key": "session", "text": {"verbosity": "low"},
            **more,
        }  # fmt: skip

    for turn in range(TURNS):
        user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"{FOX}{turn}"}]}
        items.append(user)
        patch = {"tool_choice": {"type": "custom", "name": "apply_patch"}} if turn % 5 == 0 else {}
        yield Sent(body(**patch), turn, bool(patch))
        items.append({"type": "reasoning", "id": f"rs{turn}", "summary": [], "content": [], "encrypted_content": None})
        if turn % 2:
            items += [
                {
                    "type": "custom_tool_call",
                    "call_id": f"c{turn}",
                    "name": "apply_patch",
                    "input": "*** Begin Patch\n",
                },
                {"type": "custom_tool_call_output", "call_id": f"c{turn}", "output": "Done."},
            ]
        else:
            items += [
                {"type": "function_call", "call_id": f"c{turn}", "name": "look", "namespace": "mcp__files",
                 "arguments": '{"path": "a.py"}'},
                {"type": "function_call", "call_id": f"d{turn}", "name": "Bash", "arguments": '{"command": "ls"}'},
                {"type": "function_call_output", "call_id": f"c{turn}", "output": FOX * 2},
                {"type": "function_call_output", "call_id": f"d{turn}",
                 "output": [{"type": "input_text", "text": FOX}]},
            ]  # fmt: skip
        yield Sent(body(), turn)
        said = [{"type": "output_text", "text": FOX, "annotations": []}]
        items.append({"type": "message", "role": "assistant", "content": said})


def opencode() -> Iterator[Sent]:
    """Chat Completions: calls with their results, usage at the end of each stream."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": FOX * 260}]
    tools = [
        {"type": "function", "function": {"name": name, "description": FOX, "parameters": schema, "strict": True}}
        for name, schema in SCHEMAS.items()
    ]

    def body(**more: Any) -> dict[str, Any]:
        return {"model": "tiny", "messages": [*messages], "tools": tools, "tool_choice": "auto", **more}

    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{FOX}{turn}"})
        calls = turn % 5 == 0
        yield Sent(body(**({"tool_choice": "required"} if calls else {})), turn, calls)
        function = {"name": "Read", "arguments": '{"path": "b.py"}'}
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": f"c{turn}", "type": "function", "function": function}],
            }
        )
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": FOX * 2})
        yield Sent(body(), turn)
        messages.append({"role": "assistant", "content": FOX})
