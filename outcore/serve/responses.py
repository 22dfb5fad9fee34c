"""POST /v1/responses, stateless: one answer to an input, nothing kept between requests."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from outcore.infer import Answer, Piece
from outcore.infer.chats import Parsed
from outcore.serve.body import flag, sorted_out
from outcore.serve.chat import ChatCall
from outcore.serve.errors import bad
from outcore.serve.service import Service, failure_of

FIELDS = frozenset(
    {
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "text",
        "reasoning",
        "truncation",
        "include",
    }
)
UNSUPPORTED: dict[str, Any] = {
    "previous_response_id": None,
    "conversation": None,
    "background": False,
    "prompt": None,
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
}
ENDPOINT = "/v1/responses"


class ResponseCall:
    """One request, understood as a chat. ApiError for what cannot be."""

    def __init__(self, service: Service, body: dict[str, Any]) -> None:
        fields, self.ignored = sorted_out(body, FIELDS, UNSUPPORTED)
        self.service, self.is_stream = service, flag(fields, "stream")
        chat = {k: v for k, v in fields.items() if k not in FIELDS | {"stream", "stream_options", "store", "n"}}
        chat["messages"] = _messages_of(fields)
        if (tools := fields.get("tools")) is not None:
            chat["tools"] = _tools_of(tools)
        chat |= {name: fields[name] for name in ("tool_choice", "parallel_tool_calls") if name in fields}
        if (form := _form_of(fields.get("text"))) is not None:
            chat["response_format"] = form
        self.chat = ChatCall(service, chat)
        self.instructions = fields.get("instructions")
        self.name = service.new_name("resp")
        self.created_s = int(time.time())


def _messages_of(fields: dict[str, Any]) -> list[dict[str, Any]]:
    given, messages = fields.get("input"), []
    if (told := fields.get("instructions")) is not None:
        if not isinstance(told, str):
            raise bad("instructions must be a text.", "instructions")
        messages.append({"role": "system", "content": told})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad("input must be a text or a list of items.", "input")
    for item in given:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":  # what the model thought before is not told again
            raise bad(f"input holds an item of type {kind!r}, which this server does not take.", "input")
    return messages


def _tools_of(tools: Any) -> list[Any]:
    if not isinstance(tools, list):
        raise bad("tools must be a list of functions.", "tools")
    found = []
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") != "function" or "name" not in tool:
            raise bad("tools must be functions; this server has no tools of its own.", "tools")
        found.append({"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}})
    return found


def _form_of(text: Any) -> dict[str, Any] | None:
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form if isinstance(form, dict) else None
    return {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form.get("schema")}}


async def whole(call: ResponseCall) -> dict[str, Any]:
    """The answer at once."""
    (answer,) = await call.service.answers(call.chat.request, ENDPOINT, call.name)
    parts = call.chat.chat.parts_of(call.chat.name_of(0), answer.text)
    return _response(call, _items(call, parts), answer)


async def events(call: ResponseCall) -> AsyncGenerator[dict[str, str], None]:
    """Typed events, numbered; the last one holds the whole response."""
    number = 0

    def event(kind: str, **more: Any) -> dict[str, str]:
        nonlocal number
        data = json.dumps({"type": kind, "sequence_number": number, **more})
        number += 1
        return {"event": kind, "data": data}

    place = {"item_id": f"msg-{call.name}", "output_index": 0, "content_index": 0}
    yield event("response.created", response=_response(call, [], None))
    yield event("response.in_progress", response=_response(call, [], None))
    yield event("response.output_item.added", output_index=0, item=_message(call, "", "in_progress"))
    yield event("response.content_part.added", part=_part(""), **place)
    parser = call.chat.chat.parser(call.chat.name_of(0))
    async with aclosing(call.service.stream(call.chat.request, ENDPOINT, call.name)) as items:
        async for item in items:
            new = parser.add(item.text) if isinstance(item, Piece) else parser.finish()
            if new.content:
                yield event("response.output_text.delta", delta=new.content, logprobs=[], **place)
            if isinstance(item, Answer):
                if failure := failure_of(item):
                    failed = _response(call, [], None) | {
                        "status": "cancelled" if failure.code == "cancelled" else "failed",
                        "error": {"code": "server_error", "message": failure.message},
                    }
                    yield event("response.failed", response=failed)
                    return
                said = parser.whole
                yield event("response.output_text.done", text=said.content, logprobs=[], **place)
                yield event("response.content_part.done", part=_part(said.content), **place)
                whole_items = _items(call, said, with_message=True)
                for index, one in enumerate(whole_items):
                    if index:
                        yield event("response.output_item.added", output_index=index, item=one)
                    yield event("response.output_item.done", output_index=index, item=one)
                last = _response(call, whole_items, item)
                yield event(f"response.{last['status']}", response=last)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(call: ResponseCall, text: str, status: str = "completed") -> dict[str, Any]:
    content = [_part(text)] if status == "completed" else []
    return {"type": "message", "id": f"msg-{call.name}", "role": "assistant", "status": status, "content": content}


def _items(call: ResponseCall, said: Parsed, *, with_message: bool = False) -> list[dict[str, Any]]:
    found = [_message(call, said.content)] if said.content or with_message or not said.tool_calls else []
    for number, one in enumerate(said.tool_calls):
        function = one["function"]
        found.append(
            {
                "type": "function_call",
                "id": f"fc-{call.name}-{number}",
                "call_id": one["id"],
                "name": function["name"],
                "arguments": function["arguments"],
                "status": "completed",
            }
        )
    return found


def _response(call: ResponseCall, items: list[dict[str, Any]], answer: Answer | None) -> dict[str, Any]:
    sampling, prompt_tokens = call.chat.request.sampling, len(call.chat.request.prompt)
    status, why, usage = "in_progress", None, None
    if answer is not None:
        status = "incomplete" if answer.finish == "length" else "completed"
        why = {"reason": "max_output_tokens"} if answer.finish == "length" else None
        written = len(answer.tokens)
        usage = {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.timings.cached_tokens},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + written,
        }
    return {
        "id": call.name,
        "object": "response",
        "created_at": call.created_s,
        "status": status,
        "error": None,
        "incomplete_details": why,
        "instructions": call.instructions,
        "max_output_tokens": sampling.max_tokens,
        "model": call.service.name,
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": sampling.temperature,
        "tool_choice": "auto",
        "tools": [],
        "top_p": sampling.top_p,
        "usage": usage,
        "metadata": {},
    }
