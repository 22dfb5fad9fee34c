"""POST /v1/chat/completions, and the one form of a conversation's request that other protocols are translated to."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from outcore.apart import TEXT_ONLY
from outcore.infer import Answer, Piece, Request
from outcore.infer.chats import CHAT_FIELDS, Chat, ChatError, Parsed
from outcore.infer.commands import of_chat
from outcore.infer.requests import Chosen
from outcore.serve.body import flag, sorted_out, usage_of, wants_usage
from outcore.serve.errors import ApiError, bad
from outcore.serve.prompt_scores import PROMPT_LOGPROBS, places_of, prompt_top, scores_of, written
from outcore.serve.service import Service, failure_of, reason_of

FIELDS = CHAT_FIELDS | {"response_format", PROMPT_LOGPROBS}
UNSUPPORTED: dict[str, Any] = {
    "audio": None, "modalities": ["text"], "prediction": None, "functions": None, "function_call": None,
    "web_search_options": None,
}  # fmt: skip
PLACE_BYTES = 4 << 20
"""Bytes of pictures that wait for each further place of a request: 2 GiB in all, by the usual limit."""
ENDPOINT = "/v1/chat/completions"


def chat_of(service: Service, fields: dict[str, Any]) -> Chat:
    """The conversation of these fields. ApiError for what cannot be."""
    try:
        return Chat(service.prompts, fields)
    except ChatError as error:
        words = str(error)
        if words.endswith(f"reads {TEXT_ONLY}."):
            words = words.replace("this model", f"the model {service.name!r}")
        raise bad(words, error.field, error.code) from error


class ChatCall:
    """One request, understood. ApiError for what cannot be. `name`: by which its answers are told apart from others';
    `priority`: of its place among those that wait."""

    def __init__(self, service: Service, body: dict[str, Any], name: str = "", priority: int = 0) -> None:
        fields, self.ignored = sorted_out(body, FIELDS, UNSUPPORTED)
        self.service = service
        service.check_model(fields)
        self.is_stream, self.usage = flag(fields, "stream"), wants_usage(fields)
        self.chat = chat_of(service, fields)
        name = name or service.new_name("chatcmpl")
        self.request: Request = service.request_of(fields, self.chat.ids, name, self.chat, priority)
        self.prompt_top = prompt_top(service, fields, [self.request])
        if self.request.grammar is not None:
            self.ignored += [f"{self.chat.form[1]} ({words})" for words in self.request.grammar.warnings]

    @property
    def places(self) -> int:
        """Places that it takes: pictures and scores wait in RAM. At most all, so that it runs when it is alone."""
        places = places_of(self.service, [self.request], self.prompt_top)
        places += sum(value.nbytes for value in self.request.seen.values()) // PLACE_BYTES
        return min(places, self.service.settings.max_queue)

    def name_of(self, choice: int) -> str:
        """Name of an answer, by which its calls of tools are told apart from others'."""
        return f"{self.request.name}-{choice}"

    async def told(self, endpoint: str) -> AsyncGenerator[tuple[Piece | Answer, Parsed, Parsed], None]:
        """(what came, what of it is new, the answer so far), of every answer until it has ended. ApiError when one
        failed."""
        parsers = [self.chat.parser(self.name_of(choice)) for choice in range(self.request.n)]
        async with aclosing(self.service.stream(self.request, endpoint)) as items:
            async for item in items:
                parser = parsers[item.choice]
                if isinstance(item, Answer) and (failure := failure_of(item)):
                    raise failure
                yield item, parser.add(item.text) if isinstance(item, Piece) else parser.finish(), parser.whole


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
    told = call.service.frame(call.request.name, "chat.completion") | {"choices": choices, "usage": usage}
    if call.prompt_top is not None:
        scores = await scores_of(call.service, [call.request.prompt], call.prompt_top)
        [told[PROMPT_LOGPROBS]] = await written(call.service, [call.request.prompt], scores, call.prompt_top)
    return told


async def events(call: ChatCall) -> AsyncGenerator[dict[str, str], None]:
    """Server-sent events, ending with [DONE]."""
    frame = call.service.frame(call.request.name, "chat.completion.chunk")
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

    for choice in range(call.request.n):
        yield chunk(choice, {"role": "assistant", "content": ""}, None)
    try:
        async with aclosing(call.told(ENDPOINT)) as told:
            async for item, new, so_far in told:
                tokens = item.tokens if isinstance(item, Piece) else ()
                written += len(tokens)
                if new.fields() or (tokens and tokens[0].logprob is not None):
                    yield chunk(item.choice, new.fields(), None, tokens)
                if isinstance(item, Answer):
                    cached = max(cached, item.timings.cached_tokens)
                    yield chunk(item.choice, {}, so_far.finish(reason_of(item)))
    except ApiError as failure:
        yield {"data": json.dumps(failure.body())}
        yield {"data": "[DONE]"}
        return
    if call.usage != "never":
        usage = usage_of(len(call.request.prompt), written, cached)
        yield {"data": json.dumps(frame | {"choices": [], "usage": usage})}
    yield {"data": "[DONE]"}
