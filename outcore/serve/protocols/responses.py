"""POST /v1/responses: items in, typed events out, as Codex speaks it; `previous_response_id` goes on from before."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from outcore.common.quantities import MIB
from outcore.infer import Answer
from outcore.infer.chats import Parsed
from outcore.serve.body import flag, metadata_of, sorted_out
from outcore.serve.errors import ApiError, bad
from outcore.serve.kept import packed
from outcore.serve.protocols.chat import ChatCall
from outcore.serve.service import Service

FIELDS = frozenset({
    "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls", "text",
    "reasoning", "truncation", "include",
})  # fmt: skip
UNSUPPORTED: dict[str, Any] = {
    "conversation": None, "background": False, "prompt": None, "n": 1, "logprobs": False, "top_logprobs": 0,
}  # fmt: skip
ENDPOINT = "/v1/responses"
MOST_TOLD_BYTES = MIB
"""Length of tools and the choice among them, which every response says again, on the thread that serves all."""
OUTPUTS = {"function_call_output": "function_call", "custom_tool_call_output": "custom_tool_call"}


class Tools:
    """Tools of a request by the names that the model sees. A namespace's are its name and theirs; free-form ones take
    a text, held to their grammar while it is written."""

    def __init__(self, given: Any) -> None:
        self.functions: list[dict[str, Any]] = []
        self.unknown: list[str] = []
        """Kinds of OpenAI's own tools, which are not here: the model is not told of them, and calls none."""
        self._kinds: dict[str, tuple[str, str, str | None]] = {}
        """Name that the model sees -> (kind of its call, name, namespace)."""
        if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
            raise bad("tools must be a list of tools.", "tools")
        for tool in given:
            self._add(tool, None)

    def _add(self, tool: Any, namespace: str | None) -> None:
        kind, name = (tool.get("type"), tool.get("name")) if isinstance(tool, Mapping) else (None, None)
        if kind == "namespace" and namespace is None and isinstance(name, str) and isinstance(tool.get("tools"), list):
            for inner in tool["tools"]:
                self._add(inner, name)
            return
        if kind not in ("function", "custom", "namespace"):
            self.unknown.append(f"tools.{kind}")
            return
        if kind == "namespace" or not isinstance(name, str):
            raise bad(f"a tool of type {kind!r} needs a name, and a namespace its tools.", "tools")
        seen = self.seen(name, namespace)
        self._kinds[seen] = ("function_call" if kind == "function" else "custom_tool_call", name, namespace)
        function = {"name": seen, "description": str(tool.get("description") or "")}
        function |= {"parameters": tool.get("parameters")} if kind == "function" else _free(tool.get("format"))
        self.functions.append({"type": "function", "function": function})

    @staticmethod
    def seen(name: str, namespace: str | None) -> str:
        """The name that the model sees."""
        return name if not namespace else f"{namespace.removesuffix('__')}__{name}"

    def item(self, call: Mapping[str, Any], number: int, status: str) -> dict[str, Any]:
        """A call of the model's, as clients know it."""
        function = call["function"]
        kind, name, namespace = self._kinds.get(function["name"], ("function_call", function["name"], None))
        field, text = (
            ("arguments", function["arguments"]) if kind == "function_call" else ("input", self.input_of(call))
        )
        prefix = "fc" if kind == "function_call" else "ctc"
        found = {
            "type": kind,
            "id": f"{prefix}-{call['id']}-{number}",
            "call_id": call["id"],
            "name": name,
            field: text,
        }
        return found | ({"namespace": namespace} if namespace else {}) | {"status": status}

    def is_free(self, name: str) -> bool:
        """Whether it takes a text."""
        return self._kinds.get(name, ("", "", None))[0] == "custom_tool_call"

    def input_of(self, call: Mapping[str, Any]) -> str:
        """The text of a free-form call: itself where a grammar held it, else the one argument."""
        text = call["function"]["arguments"]
        function = next(f["function"] for f in self.functions if f["function"]["name"] == call["function"]["name"])
        if "grammar" in function:
            return text
        try:
            return str(json.loads(text)["input"])
        except (ValueError, KeyError, TypeError):  # it was cut off
            return ""


def _free(form: Any) -> dict[str, Any]:
    """A tool that takes a text: one argument, or what its grammar allows."""
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    found: dict[str, Any] = {"parameters": schema | {"additionalProperties": False}}
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        text, syntax = form.get("definition"), form.get("syntax")
        if not isinstance(text, str) or syntax not in ("lark", "regex"):
            raise bad("format of a custom tool must have a definition, and lark or regex as its syntax.", "tools")
        slashed = re.sub(r"(?<!\\)/", r"\\/", text)
        found["grammar"] = text if syntax == "lark" else f"start: /{slashed}/"
    return found


class ResponseCall:
    """One request, understood as a chat. ApiError for what cannot be."""

    def __init__(self, service: Service, body: dict[str, Any]) -> None:
        fields, self.ignored = sorted_out(body, FIELDS, UNSUPPORTED)
        self.service, self.is_stream, self.fields = service, flag(fields, "stream"), fields
        self.metadata = metadata_of(fields) or {}
        if len(json.dumps([fields.get("tools"), fields.get("tool_choice")])) > MOST_TOLD_BYTES:
            raise bad(f"tools and tool_choice must take {MOST_TOLD_BYTES >> 20} MiB at most.", "tools")
        self.tools = Tools(fields.get("tools") or [])
        self.ignored += self.tools.unknown
        before = _items_of(fields, service)
        chat = {k: v for k, v in fields.items() if k not in FIELDS | {"stream", "stream_options", "store", "n"}}
        chat["messages"] = [*_told_first(fields.get("instructions")), *_messages_of(before)]
        if self.tools.functions:
            chat["tools"] = self.tools.functions
        if "tool_choice" in fields:
            chat["tool_choice"] = _choice_of(fields["tool_choice"])
        chat |= {"parallel_tool_calls": fields["parallel_tool_calls"]} if "parallel_tool_calls" in fields else {}
        if (form := _form_of(fields.get("text"))) is not None:
            chat["response_format"] = form
        self.name = service.responses.new_name()
        self.chat = ChatCall(service, chat, self.name)
        self.ignored += self.chat.ignored
        self.places = self.chat.places
        self.created_s = int(time.time())
        # here, on a thread for it: what clients put beside the words of an item may be long
        self._before = None if fields.get("store") is False else packed(before)
        del fields["input"]

    def keep(self, items: list[dict[str, Any]]) -> None:
        """Keep the conversation for a request that goes on from here."""
        if self._before is not None:
            self.service.responses.put(self.name, [*self._before, *packed(items)])


def _items_of(fields: Mapping[str, Any], service: Service) -> list[Any]:
    """The whole conversation's items, those before this request first."""
    given = fields.get("input")
    items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise bad("input must be a text or a list of items.", "input")
    previous = fields.get("previous_response_id")
    return items if previous is None else [*service.responses.get(previous), *items]


def _told_first(instructions: Any) -> list[dict[str, Any]]:
    if instructions is None or instructions == "":
        return []
    if not isinstance(instructions, str):
        raise bad("instructions must be a text.", "instructions")
    return [{"role": "system", "content": instructions}]


def _messages_of(items: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "reasoning":
            thought = "".join(
                str(part.get("text", "")) for part in item.get("content") or () if isinstance(part, Mapping)
            )
            continue
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind in OUTPUTS.values():
            name = Tools.seen(str(item.get("name")), item.get("namespace"))
            text = item.get("arguments") if kind == "function_call" else json.dumps({"input": item.get("input")})
            function = {"name": name, "arguments": text}
            if not messages or messages[-1]["role"] != "assistant":  # calls stand in the message that they end
                messages.append({"role": "assistant", "content": ""})
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind in OUTPUTS:
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        else:
            raise bad(f"input holds an item of type {kind!r}, which this server does not take.", "input")
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thought = thought, ""
    return messages


def _choice_of(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": Tools.seen(str(choice.get("name")), choice.get("namespace"))}}
    return choice


def _form_of(text: Any) -> dict[str, Any] | None:
    form = text.get("format") if isinstance(text, Mapping) else None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form if isinstance(form, dict) else None
    return {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form.get("schema")}}


class ResponseOutput:
    """Items of a response while it is written. `take` what is new; each call gives the events of it."""

    def __init__(self, call: ResponseCall) -> None:
        self.items: list[dict[str, Any]] = []
        self._name, self._tools = call.name, call.tools
        self._open = ""
        self._call: dict[str, Any] = {}

    def take(self, new: Parsed) -> list[dict[str, Any]]:
        """Events of what is new."""
        found: list[dict[str, Any]] = []
        for kind, text in (("reasoning", new.reasoning), ("message", new.content)):
            if text := text if self._open == kind else text.lstrip("\n"):
                found += self._opened(kind)
                part = self.items[-1]["content"][0]
                part["text"] += text
                more = {"logprobs": []} if kind == "message" else {}
                found.append(self._event(f"response.{part['type']}.delta", delta=text, content_index=0, **more))
        for delta in new.tool_calls:
            if "id" in delta:
                found += self._closed()
                self._call = {**delta, "function": dict(delta["function"])}
                found += self._begun("call", self._tools.item(self._call, len(self.items), "in_progress"))
            else:
                self._call["function"]["arguments"] += delta["function"]["arguments"]
            text = delta["function"]["arguments"]
            if text and not self._tools.is_free(self._call["function"]["name"]):
                found.append(self._event("response.function_call_arguments.delta", delta=text))
            elif text and (more := self._more_input()):
                found.append(self._event("response.custom_tool_call_input.delta", delta=more))
        return found

    def end(self, so_far: Parsed) -> list[dict[str, Any]]:
        """Events of the end. An answer that says nothing is an empty message."""
        found = [] if self.items else self._opened("message")
        return [*found, *self._closed("incomplete" if so_far.is_cut else "completed")]

    def _more_input(self) -> str:
        """Read on in the text of a free-form call; returns what is new."""
        told = self.items[-1]["input"]
        self.items[-1]["input"] = self._tools.input_of(self._call)
        return self.items[-1]["input"][len(told) :]

    def _opened(self, kind: str) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        closed = self._closed()
        if kind == "message":
            item = {"type": kind, "id": f"msg-{self._name}-{len(self.items)}", "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": kind, "id": f"rs-{self._name}-{len(self.items)}", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        begun = self._begun(kind, item | {"content": [], "status": "in_progress"})
        self.items[-1]["content"] = [part]
        return [*closed, *begun, self._event("response.content_part.added", part=dict(part), content_index=0)]

    def _begun(self, kind: str, item: dict[str, Any]) -> list[dict[str, Any]]:
        self.items.append(item)
        self._open = kind
        return [{"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}]

    def _closed(self, status: str = "completed") -> list[dict[str, Any]]:
        if not self._open:
            return []
        item, found = self.items[-1], []
        if self._open == "call":
            item |= self._tools.item(self._call, len(self.items) - 1, status)
            named = {"name": item["name"]}
            if item["type"] == "function_call":
                done = self._event("response.function_call_arguments.done", arguments=item["arguments"], **named)
            else:
                done = self._event("response.custom_tool_call_input.done", input=item["input"])
            found.append(done)
        else:
            item["status"], part = "completed", item["content"][0]
            more = {"logprobs": []} if self._open == "message" else {}
            found.append(self._event(f"response.{part['type']}.done", text=part["text"], content_index=0, **more))
            found.append(self._event("response.content_part.done", part=part, content_index=0))
        self._open = ""
        return [*found, {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}]

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}


async def whole(call: ResponseCall) -> dict[str, Any]:
    """The answer at once."""
    (answer,) = await call.service.answers(call.chat.request, ENDPOINT)
    parser, output = call.chat.chat.parser(call.chat.name_of(0)), ResponseOutput(call)
    output.take(parser.add(answer.text))
    output.take(parser.finish())
    output.end(parser.whole)
    call.keep(output.items)
    return _response(call, output.items, answer)


async def events(call: ResponseCall) -> AsyncGenerator[dict[str, str], None]:
    """Typed events, numbered; the last one holds the whole response."""
    number, output = 0, ResponseOutput(call)

    def sent(event: dict[str, Any]) -> dict[str, str]:
        nonlocal number
        data = json.dumps({"type": event["type"], "sequence_number": number, **event})
        number += 1
        return {"event": event["type"], "data": data}

    yield sent({"type": "response.created", "response": _response(call, [], None)})
    yield sent({"type": "response.in_progress", "response": _response(call, [], None)})
    try:
        async with aclosing(call.chat.told(ENDPOINT)) as told:
            async for item, new, so_far in told:
                for event in output.take(new):
                    yield sent(event)
                if isinstance(item, Answer):
                    for event in output.end(so_far):
                        yield sent(event)
                    call.keep(output.items)
                    last = _response(call, output.items, item)
                    yield sent({"type": f"response.{last['status']}", "response": last})
    except ApiError as failure:
        failed = _response(call, [], None) | {
            "status": "cancelled" if failure.code == "cancelled" else "failed",
            "error": {"code": "server_error", "message": failure.message},
        }
        yield sent({"type": "response.failed", "response": failed})


def _response(call: ResponseCall, items: list[dict[str, Any]], answer: Answer | None) -> dict[str, Any]:
    sampling, prompt_tokens, fields = call.chat.request.sampling, len(call.chat.request.prompt), call.fields
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
        "instructions": fields.get("instructions"),
        "max_output_tokens": sampling.max_tokens,
        "model": call.service.name,
        "output": items,
        "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
        "previous_response_id": fields.get("previous_response_id"),
        "store": fields.get("store") is not False,
        "temperature": sampling.temperature,
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "top_p": sampling.top_p,
        "usage": usage,
        "metadata": call.metadata,
    }
