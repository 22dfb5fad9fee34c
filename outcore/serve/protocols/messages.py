"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol, as coding agents speak it."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from outcore.infer import Answer
from outcore.infer.chats import Parsed
from outcore.infer.requests import KNOWN
from outcore.serve.body import flag
from outcore.serve.errors import ApiError, bad
from outcore.serve.protocols.chat import ChatCall, chat_of
from outcore.serve.service import Service

ENDPOINT = "/v1/messages"
OTHERWISE = {"max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "logprobs", "top_logprobs"}
SAME = (KNOWN - OTHERWISE) | {"model", "stream"}
"""Fields that are called the same in the one form."""
OWN = frozenset({"max_tokens", "messages", "metadata", "stop_sequences", "system", "thinking", "tool_choice", "tools"})
BILLING = "x-anthropic-billing-header:"
"""Beginning of a text that a client puts first into its system prompt and changes with every request: left out, since
no prompt would begin with what the cache has."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
MOST = sys.float_info.max  # in a call's input: a model may write 1e999
MARK = "outcore"
"""Signature of thoughts: clients want one and send it back."""


class MessagesCall:
    """One request, understood. ApiError for what cannot be."""

    def __init__(self, service: Service, body: dict[str, Any]) -> None:
        fields, self.ignored = _fields_of(body)
        most, self.service, self.is_stream = body.get("max_tokens"), service, flag(body, "stream")
        if type(most) is not int or most < 1:
            raise bad(f"max_tokens: must be a whole number above 0, got {most!r}.", "max_tokens")
        self.name = service.new_name("msg")
        # titles and summaries, which come without tools, wait behind the conversation that they are about
        try:
            self.chat = ChatCall(service, fields, self.name, 0 if fields.get("tools") else -1)
        except ApiError as error:
            if error.code == "context_length_exceeded":  # words by which clients know that they have to shorten it
                raise bad(f"prompt is too long: {error.message}", "messages", error.code) from error
            raise
        self.ignored += self.chat.ignored
        self.places = self.chat.places
        # clients say the most that a model of theirs can give; this one gives what the server and its context leave
        request = self.chat.request
        try:
            sampling = replace(request.sampling, max_tokens=min(most, request.sampling.max_tokens))
        except ValueError as error:
            raise bad(str(error), "min_tokens") from error
        self.chat.request = replace(request, sampling=sampling)

    def message(self, content: list[Any], answer: Answer | None, stop: tuple[str, str | None] | None) -> dict[str, Any]:
        """The whole message, or how it begins."""
        reason, text = stop or (None, None)
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self.service.name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": text,
            "usage": self.usage(answer),
        }

    def usage(self, answer: Answer | None) -> dict[str, Any]:
        """Make the `usage` of an answer, in Anthropic's shape: tokens that came from the cache are counted apart."""
        cached = answer.timings.cached_tokens if answer else 0
        return {
            "input_tokens": len(self.chat.request.prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(answer.tokens) if answer else 0,
        }


def counted(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Tokens of a request, which is not answered."""
    fields, _ = _fields_of(body)
    service.check_model(fields)
    return {"input_tokens": len(chat_of(service, fields).ids)}


def _fields_of(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the one form, names of fields that mean nothing here)."""
    ignored = sorted(body.keys() - SAME - OWN)
    fields: dict[str, Any] = {name: body[name] for name in SAME if body.get(name) is not None}
    fields["messages"] = [*_system_of(body.get("system")), *_messages_of(body.get("messages"))]
    if fields["messages"][-1]["role"] == "assistant" and not fields["messages"][-1].get("tool_calls"):
        fields["continue_final_message"] = True
    if (stops := body.get("stop_sequences")) is not None:
        fields["stop"] = stops
    if (thinking := body.get("thinking")) is not None:
        kind = thinking.get("type") if isinstance(thinking, Mapping) else None
        if kind not in ("enabled", "disabled", "adaptive"):
            raise bad("thinking.type: must be enabled, adaptive or disabled.", "thinking")
        fields["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
    if body.get("tools"):
        fields["tools"], unknown = _tools_of(body["tools"])
        ignored += unknown
    if (choice := body.get("tool_choice")) is not None:
        kind = choice.get("type") if isinstance(choice, Mapping) else None
        if kind not in (*CHOICES, "tool"):
            raise bad("tool_choice.type: must be auto, any, tool or none.", "tool_choice")
        named = {"type": "function", "function": {"name": choice.get("name")}}
        fields["tool_choice"] = CHOICES.get(kind, named)
        fields["parallel_tool_calls"] = not flag(choice, "disable_parallel_tool_use")
    return fields, ignored


def _system_of(system: Any) -> list[dict[str, Any]]:
    if system is None:
        return []
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    if not isinstance(blocks, list):
        raise bad("system: must be a text or a list of text blocks.", "system")
    texts = [_text_of(block, f"system.{number}") for number, block in enumerate(blocks)]
    kept = [text for text in texts if not text.startswith(BILLING)]
    return [{"role": "system", "content": "\n\n".join(kept)}] if kept else []


def _messages_of(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise bad("messages: must be a list of at least one message.", "messages")
    found: list[dict[str, Any]] = []
    reminders: list[str] = []
    for number, message in enumerate(given):
        where = f"messages.{number}"
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if role not in ("user", "assistant", "system") or (role == "system" and not found):
            words = "must be user or assistant, or system behind the first message (or in `system`)"
            raise bad(f"{where}.role: {words}, got {role!r}.", "messages")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise bad(f"{where}.content: must be a text or a list of blocks.", "messages")
        placed = [(f"{where}.content.{at}", block) for at, block in enumerate(blocks)]
        if role == "system":
            reminders.append("\n\n".join(_text_of(block, at) for at, block in placed))
        else:
            _remind(found, reminders)
            reminders = []
            found += _said_by_assistant(placed) if role == "assistant" else _said_by_user(placed)
    _remind(found, reminders)
    return found


def _remind(messages: list[dict[str, Any]], texts: list[str]) -> None:
    """Add what a system says within a conversation to the user's turn, marked as Claude Code marks it there: many
    templates refuse a system's message behind the first, or two of one side in a row."""
    marked = [f"<system-reminder>\n{text}\n</system-reminder>" for text in texts]
    if marked:
        before = messages.pop()["content"] if messages[-1]["role"] == "user" else []
        messages.append(_user([before] if isinstance(before, str) else before, marked))


def _said_by_user(blocks: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    results, said = list[dict[str, Any]](), list[Any]()
    for where, block in blocks:
        if _kind_of(block) == "tool_result":
            content = block.get("content")
            inner = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
            if not isinstance(inner, list):
                raise bad(f"{where}.content: must be a text or a list of blocks.", "messages")
            # pictures of a result stand in the user's words behind it: templates write none in a result
            said += [_picture_of(one) for one in inner if _kind_of(one) == "image"]
            texts = [(at, one) for at, one in enumerate(inner) if _kind_of(one) != "image"]
            text = "\n".join(_text_of(one, f"{where}.content.{at}") for at, one in texts)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            said.append(_picture_of(block) if _kind_of(block) == "image" else _text_of(block, where))
    return [*results, *([_user(said)] if said or not results else [])]


def _user(*said: list[Any]) -> dict[str, Any]:
    """A user's message of texts and pictures: one text where there are no pictures."""
    parts: list[Any] = [part for group in said for part in group]
    if all(isinstance(part, str) for part in parts):
        return {"role": "user", "content": "\n\n".join(parts)}
    content = list[Any]()
    for part in parts:
        text = part if isinstance(part, str) else part.get("text")
        if text is not None and content and content[-1]["type"] == "text":
            content[-1]["text"] += f"\n\n{text}"
        else:
            content.append({"type": "text", "text": text} if text is not None else part)
    return {"role": "user", "content": content}


def _picture_of(block: Mapping[str, Any]) -> dict[str, Any]:
    """A picture's block as a part of the one form; what is none becomes a part without a picture."""
    source = block.get("source")
    source = source if isinstance(source, Mapping) else {}
    url = f"data:{source.get('media_type')};base64,{source.get('data')}" if source.get("data") else source.get("url")
    return {"type": "image_url", "image_url": {"url": url}}


def _said_by_assistant(blocks: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for where, block in blocks:
        kind = _kind_of(block)
        if kind == "tool_use":
            name, given = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(given, Mapping):
                raise bad(f"{where}: a tool_use needs a name, and an input that is an object.", "messages")
            function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(_text_of(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    message |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
    return [message | ({"tool_calls": calls} if calls else {})]


def _kind_of(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _text_of(block: Any, where: str) -> str:
    kind = _kind_of(block)
    if kind == "document" and isinstance(block.get("source"), Mapping) and block["source"].get("type") == "text":
        block, kind = {"text": block["source"].get("data")}, "text"
    if kind != "text" or not isinstance(block.get("text"), str):
        raise bad(f"{where}: a block of type {kind!r} cannot be read; this model reads text only.", "messages")
    return block["text"]


def _tools_of(tools: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """(functions, names of Anthropic's own tools, which are not here)."""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise bad("tools: must be a list of tools.", "tools")
    found, unknown = [], []
    for number, tool in enumerate(tools):
        name, schema = tool.get("name"), tool.get("input_schema")
        if tool.get("type", "custom") not in ("custom", None) and schema is None:
            unknown.append(f"tools.{tool.get('type')}")
            continue
        if not isinstance(name, str) or not isinstance(schema, Mapping):
            raise bad(f"tools.{number}: a tool needs a name and an input_schema.", "tools")
        function = {"name": name, "description": str(tool.get("description") or ""), "parameters": dict(schema)}
        found.append({"type": "function", "function": function})
    return found, unknown


class Blocks:
    """Content of a message while it is written. `take` what is new; each call gives the events of it."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._blank, self._input = "", ""
        self._is_open = False

    def take(self, new: Parsed) -> list[dict[str, Any]]:
        """Events of what is new."""
        found: list[dict[str, Any]] = []
        for kind, text in (("thinking", new.reasoning), ("text", new.content)):
            if not self._is_open or self.content[-1]["type"] != kind:  # a block of blanks alone is none
                text = (self._blank + text).lstrip()
                self._blank = ""
            if text:
                found += self._opened(kind, lambda kind=kind: {"type": kind, kind: ""})
                self.content[-1][kind] += text
                found.append(self._delta(f"{kind}_delta", kind, text))
        for delta in new.tool_calls:
            function = delta["function"]
            if "id" in delta:
                found += self._closed()
                call = {"type": "tool_use", "id": delta["id"], "name": function["name"], "input": {}}
                found += self._opened("", lambda call=call: call)
            if function["arguments"]:
                self._input += function["arguments"]
                found.append(self._delta("input_json_delta", "partial_json", function["arguments"]))
        return found

    def end(self, so_far: Parsed) -> list[dict[str, Any]]:
        """Events of the end."""
        return self._closed(is_cut=so_far.is_cut)

    def _opened(self, kind: str, block: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        if self._is_open and self.content[-1]["type"] == kind:
            return []
        closed = self._closed()
        self.content.append(block())
        self._is_open = True
        begun = dict(self.content[-1]) | ({"signature": ""} if kind == "thinking" else {})
        return [*closed, self._event("content_block_start", content_block=begun)]

    def _closed(self, *, is_cut: bool = False) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open, last, found = False, self.content[-1], []
        if last["type"] == "thinking":
            last["signature"] = MARK
            found.append(self._delta("signature_delta", "signature", MARK))
        found.append(self._event("content_block_stop"))
        if last["type"] == "tool_use":
            if is_cut:  # half an input is none
                self.content.pop()
            else:
                last["input"] = json.loads(self._input or "{}", parse_float=lambda n: max(-MOST, min(MOST, float(n))))
            self._input = ""
        return found

    def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        return self._event("content_block_delta", delta={"type": kind, name: text})

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self.content) - 1, **more}


def _stop_of(answer: Answer, so_far: Parsed) -> tuple[str, str | None]:
    """(reason, text) of the end."""
    if answer.finish == "length":
        return "max_tokens", None
    if so_far.tool_calls:
        return "tool_use", None
    return ("stop_sequence", answer.stop) if isinstance(answer.stop, str) else ("end_turn", None)


async def whole(call: MessagesCall) -> dict[str, Any]:
    """The answer at once."""
    (answer,) = await call.service.answers(call.chat.request, ENDPOINT)
    parser, blocks = call.chat.chat.parser(call.chat.name_of(0)), Blocks()
    blocks.take(parser.add(answer.text))
    blocks.take(parser.finish())
    blocks.end(parser.whole)
    return call.message(blocks.content, answer, _stop_of(answer, parser.whole))


async def events(call: MessagesCall) -> AsyncGenerator[dict[str, str], None]:
    """Typed events, as Anthropic's clients read them."""
    blocks = Blocks()

    def sent(event: dict[str, Any]) -> dict[str, str]:
        return {"event": event["type"], "data": json.dumps(event)}

    yield sent({"type": "message_start", "message": call.message([], None, None)})
    yield sent({"type": "ping"})
    try:
        async with aclosing(call.chat.told(ENDPOINT)) as told:
            async for item, new, so_far in told:
                for event in blocks.take(new):
                    yield sent(event)
                if isinstance(item, Answer):
                    for event in blocks.end(so_far):
                        yield sent(event)
                    reason, text = _stop_of(item, so_far)
                    delta = {"stop_reason": reason, "stop_sequence": text}
                    yield sent({"type": "message_delta", "delta": delta, "usage": call.usage(item)})
                    yield sent({"type": "message_stop"})
    except ApiError as failure:
        yield sent(failure.body(ENDPOINT))
