"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from outcore.infer import Answer, Piece, Request
from outcore.infer.commands import of_chat
from outcore.infer.requests import Chosen
from outcore.serve.body import flag, sorted_out, usage_of, wants_usage
from outcore.serve.errors import bad
from outcore.serve.parsing import AnswerParser, Mode, Parsed, TemplateParser, marks_of, takes_tools
from outcore.serve.service import Service, failure_of, reason_of

FIELDS = frozenset(
    {"messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "response_format"}
)
UNSUPPORTED: dict[str, Any] = {
    "audio": None,
    "modalities": ["text"],
    "prediction": None,
    "functions": None,
    "function_call": None,
    "web_search_options": None,
}
ENDPOINT = "/v1/chat/completions"


class ChatCall:
    """One request, understood. ApiError for what cannot be."""

    def __init__(self, service: Service, body: dict[str, Any]) -> None:
        fields, self.ignored = sorted_out(body, FIELDS, UNSUPPORTED)
        self.service = service
        service.check_model(fields)
        self.is_stream, self.with_usage = flag(fields, "stream"), wants_usage(fields)
        messages, tools = fields.get("messages"), _tools_of(fields, service)
        if not isinstance(messages, list) or not messages:
            raise bad("messages must be a list of at least one message.", "messages")
        more = fields.get("chat_template_kwargs") or {}
        if not isinstance(more, dict):
            raise bad("chat_template_kwargs must be an object.", "chat_template_kwargs")
        if "chat_template" in more:  # a program of the client's, which nothing stops
            raise bad("chat_template_kwargs are variables of the model's own template.", "chat_template_kwargs")
        if tools:
            more = {**more, "tools": tools}
        try:
            prompt = service.prompts.text_of(messages, **more)
        except (ValueError, TypeError) as error:
            raise bad(str(error), "messages") from error
        ids = tuple(service.prompts.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        self.request: Request = service.request_of(fields, ids, service.new_name("chatcmpl"))
        self._template = getattr(service.prompts.tokenizer, "response_template", None)
        self._prompt, self._tools = prompt, tools
        if self._template is not None:
            self.request = replace(self.request, keeps_special=True)
        self._marks = marks_of(service.prompts.tokenizer, with_tools=bool(tools))
        self._begins_in: Mode = "reasoning" if prompt.rstrip().endswith("<think>") else "content"

    def parser(self, choice: int) -> AnswerParser | TemplateParser:
        """What tells an answer's parts apart."""
        name = f"{self.request.name}-{choice}"
        if self._template is not None:
            return TemplateParser(name, self._template, self._prompt, self._tools)
        return AnswerParser(name, self._marks, self._begins_in)


def _tools_of(fields: dict[str, Any], service: Service) -> list[Any]:
    tools, choice = fields.get("tools") or [], fields.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise bad("tools must be a list of functions.", "tools")
    if choice not in ("auto", "none", None):
        raise bad("tool_choice must be auto or none; this server does not force a call.", "tool_choice")
    if not tools or choice == "none":
        return []
    if not takes_tools(service.prompts.tokenizer):
        raise bad("This model's chat template knows no tools.", "tools", "unsupported_parameter")
    return tools


async def whole(call: ChatCall) -> dict[str, Any]:
    """All answers at once."""
    answers = await call.service.answers(call.request, ENDPOINT)
    choices = []
    for answer in answers:
        parser = call.parser(answer.choice)
        parser.add(answer.text)
        parser.finish()
        message: dict[str, Any] = {"role": "assistant", **_said(parser.whole)}
        message.setdefault("content", None if parser.whole.tool_calls else "")
        choices.append(
            {
                "index": answer.choice,
                "message": message,
                "finish_reason": _reason(answer, parser.whole),
                "logprobs": of_chat(call.service.prompts.tokenizer, answer.tokens),
            }
        )
    usage = usage_of(len(call.request.prompt), sum(len(a.tokens) for a in answers), answers[0].timings.cached_tokens)
    return call.service.frame(call.request.name, "chat.completion") | {"choices": choices, "usage": usage}


async def events(call: ChatCall) -> AsyncGenerator[dict[str, str], None]:
    """Server-sent events, ending with [DONE]."""
    frame = call.service.frame(call.request.name, "chat.completion.chunk")
    parsers = [call.parser(i) for i in range(call.request.n)]
    calls_told = [0] * call.request.n
    cached = written = 0

    def chunk(
        choice: int, delta: dict[str, Any], reason: str | None, tokens: tuple[Chosen, ...] = ()
    ) -> dict[str, str]:
        logprobs = of_chat(call.service.prompts.tokenizer, tokens)
        one = {"index": choice, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return {"data": json.dumps(frame | {"choices": [one]} | ({"usage": None} if call.with_usage else {}))}

    def delta_of(choice: int, new: Parsed) -> dict[str, Any]:
        delta = _said(new)
        for one in delta.get("tool_calls", []):
            one["index"] = calls_told[choice]
            calls_told[choice] += 1
        return delta

    for choice in range(call.request.n):
        yield chunk(choice, {"role": "assistant", "content": ""}, None)
    async with aclosing(call.service.stream(call.request, ENDPOINT)) as items:
        async for item in items:
            parser = parsers[item.choice]
            if isinstance(item, Piece):
                delta = delta_of(item.choice, parser.add(item.text))
                if delta or (item.tokens and item.tokens[0].logprob is not None):
                    yield chunk(item.choice, delta, None, item.tokens)
                continue
            if failure := failure_of(item):
                yield {"data": json.dumps(failure.body())}
                yield {"data": "[DONE]"}
                return
            cached, written = max(cached, item.timings.cached_tokens), written + len(item.tokens)
            if delta := delta_of(item.choice, parser.finish()):
                yield chunk(item.choice, delta, None)
            yield chunk(item.choice, {}, _reason(item, parser.whole))
    if call.with_usage:
        usage = usage_of(len(call.request.prompt), written, cached)
        yield {"data": json.dumps(frame | {"choices": [], "usage": usage})}
    yield {"data": "[DONE]"}


def _said(parsed: Parsed) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if parsed.content:
        found["content"] = parsed.content
    if parsed.reasoning:
        found["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        found["tool_calls"] = [dict(one) for one in parsed.tool_calls]
    return found


def _reason(answer: Answer, parsed: Parsed) -> str:
    if parsed.tool_calls and answer.finish == "stop":
        return "tool_calls"
    return reason_of(answer)
