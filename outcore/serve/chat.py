"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from outcore.infer import Piece, Request
from outcore.infer.chats import CHAT_FIELDS, Chat, ChatError, Parsed
from outcore.infer.commands import of_chat
from outcore.infer.requests import Chosen
from outcore.serve.body import flag, sorted_out, usage_of, wants_usage
from outcore.serve.errors import bad
from outcore.serve.service import Service, failure_of, reason_of

FIELDS = CHAT_FIELDS | {"response_format"}
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
        self.is_stream, self.usage = flag(fields, "stream"), wants_usage(fields)
        try:
            self.chat = Chat(service.prompts, fields)
        except ChatError as error:
            raise bad(str(error), error.field, error.code) from error
        name = service.new_name("chatcmpl")
        self.request: Request = service.request_of(fields, self.chat.ids, name, self.chat)

    def name_of(self, choice: int) -> str:
        """Name of an answer, by which its calls of tools are told apart from others'."""
        return f"{self.request.name}-{choice}"


async def whole(call: ChatCall) -> dict[str, Any]:
    """All answers at once."""
    answers = await call.service.answers(call.request, ENDPOINT)
    choices = []
    for answer in answers:
        parts = call.chat.parts_of(call.name_of(answer.choice), answer.text)
        choices.append(
            {
                "index": answer.choice,
                "message": parts.message(),
                "finish_reason": parts.finish(reason_of(answer)),
                "logprobs": of_chat(call.service.prompts.tokenizer, answer.tokens),
            }
        )
    usage = usage_of(len(call.request.prompt), sum(len(a.tokens) for a in answers), answers[0].timings.cached_tokens)
    return call.service.frame(call.request.name, "chat.completion") | {"choices": choices, "usage": usage}


async def events(call: ChatCall) -> AsyncGenerator[dict[str, str], None]:
    """Server-sent events, ending with [DONE]."""
    frame = call.service.frame(call.request.name, "chat.completion.chunk")
    parsers = [call.chat.parser(call.name_of(i)) for i in range(call.request.n)]
    calls_told = [0] * call.request.n
    cached = written = 0

    def chunk(
        choice: int, delta: dict[str, Any], reason: str | None, tokens: tuple[Chosen, ...] = ()
    ) -> dict[str, str]:
        logprobs = of_chat(call.service.prompts.tokenizer, tokens)
        one = {"index": choice, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return {"data": json.dumps(frame | {"choices": [one]} | usage_so_far())}

    def usage_so_far() -> dict[str, Any]:
        cost = usage_of(len(call.request.prompt), written, cached) if call.usage == "always" else None
        return {} if call.usage == "never" else {"usage": cost}

    def delta_of(choice: int, new: Parsed) -> dict[str, Any]:
        delta = new.fields()
        if new.tool_calls:
            delta["tool_calls"] = [{"index": calls_told[choice] + i, **one} for i, one in enumerate(new.tool_calls)]
            calls_told[choice] += len(new.tool_calls)
        return delta

    for choice in range(call.request.n):
        yield chunk(choice, {"role": "assistant", "content": ""}, None)
    async with aclosing(call.service.stream(call.request, ENDPOINT)) as items:
        async for item in items:
            parser = parsers[item.choice]
            if isinstance(item, Piece):
                written += len(item.tokens)
                delta = delta_of(item.choice, parser.add(item.text))
                if delta or (item.tokens and item.tokens[0].logprob is not None):
                    yield chunk(item.choice, delta, None, item.tokens)
                continue
            if failure := failure_of(item):
                yield {"data": json.dumps(failure.body())}
                yield {"data": "[DONE]"}
                return
            cached = max(cached, item.timings.cached_tokens)
            if delta := delta_of(item.choice, parser.finish()):
                yield chunk(item.choice, delta, None)
            yield chunk(item.choice, {}, parser.whole.finish(reason_of(item)))
    if call.usage != "never":
        usage = usage_of(len(call.request.prompt), written, cached)
        yield {"data": json.dumps(frame | {"choices": [], "usage": usage})}
    yield {"data": "[DONE]"}
