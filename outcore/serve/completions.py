"""POST /v1/completions: prompts as text or token ids, one or many; `echo` with `logprobs` tells their likelihood."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from outcore.apart import too_long_code
from outcore.infer import Answer, Piece, Request
from outcore.infer.commands import CompletionLogprobs
from outcore.infer.passes import TokenScore
from outcore.serve.body import flag, sorted_out, usage_of, wants_usage
from outcore.serve.errors import bad
from outcore.serve.prompt_scores import PROMPT_LOGPROBS, places_of, prompt_top, scores_of, written
from outcore.serve.service import Service, failure_of, reason_of

FIELDS = frozenset({"prompt", "echo", "response_format", PROMPT_LOGPROBS})
UNSUPPORTED: dict[str, Any] = {"suffix": None, "best_of": 1, "top_logprobs": None}
ENDPOINT, KIND = "/v1/completions", "text_completion"
MAX_PROMPTS = 2048
LENGTH_NAMES = ("max_tokens", "max_completion_tokens", "max_output_tokens")
USUAL_TOKENS = 16
"""Tokens of an answer where the request does not say, as OpenAI has it; fewer where the context leaves fewer."""


class CompletionCall:
    """One request, understood. ApiError for what cannot be."""

    def __init__(self, service: Service, body: dict[str, Any]) -> None:
        body = {name: value for name, value in body.items() if (name, value) != ("suffix", "")}  # nothing follows
        fields, self.ignored = sorted_out(body, FIELDS, UNSUPPORTED)
        self.service = service
        service.check_model(fields)
        self.is_stream, self.usage = flag(fields, "stream"), wants_usage(fields)
        self.echo = flag(fields, "echo")
        if self.echo and fields.get("logprobs") is not None:
            service.check_whole()
        if isinstance(fields.get("logprobs"), bool):
            raise bad("logprobs must be a whole number here; true and false are for chats.", "logprobs")
        given = fields.get("prompt")
        self.prompts = texts_of(given, "prompt", service)
        self.given = given if isinstance(given, list) and not _is_ids(given) else [given]
        says_length = any(fields.get(name) is not None for name in LENGTH_NAMES)
        self.only_scores = fields.get("max_tokens") == 0
        if self.only_scores:
            if not self.echo:
                raise bad("max_tokens 0 gives nothing without echo: true.", "max_tokens")
            fields["max_tokens"] = 1
        self.name = service.new_name("cmpl")
        self.requests: list[Request] = []
        for number, ids in enumerate(self.prompts):
            room = max(1, min(USUAL_TOKENS, service.max_context - len(ids)))
            said = fields if says_length else fields | {"max_tokens": room}
            self.requests.append(service.request_of(said, ids, f"{self.name}-{number}"))
        self.num_top = self.requests[0].sampling.logprobs
        self.prompt_top = prompt_top(service, fields, self.requests)
        self.places = places_of(service, self.requests, self.prompt_top)
        if self.is_stream and self.echo:
            raise bad("echo does not go with stream: true.", "echo")


def texts_of(given: Any, field: str, service: Service) -> list[tuple[int, ...]]:
    """A text, token ids, or a list of these, as lists of ids. ApiError naming `field`."""
    form = bad(f"{field} must be a text, a list of token ids, or a list of these.", field)
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        raise form
    if _is_ids(given):
        given = [given]
    if len(given) > MAX_PROMPTS:
        raise bad(f"{len(given)} texts are more than {MAX_PROMPTS}.", field)
    if not all(isinstance(item, str) or (_is_ids(item) and item) for item in given):
        raise form
    try:
        of_texts = iter(service.prompts.of_texts([item for item in given if isinstance(item, str)]))
    except ValueError as error:
        raise bad(str(error), field, too_long_code(error)) from error
    return [next(of_texts) if isinstance(item, str) else tuple(item) for item in given]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


async def whole(call: CompletionCall) -> dict[str, Any]:
    """All answers to all prompts at once."""
    service = call.service
    scores: Sequence[Sequence[TokenScore]] = [[] for _ in call.prompts]
    if call.echo and call.num_top is not None:
        scores = await service.thread.score(call.prompts, call.num_top)
    of_prompts: Any = None
    if call.prompt_top is not None:
        of_prompts = await scores_of(service, call.prompts, call.prompt_top)
    answers: list[list[Answer]] = [[] for _ in call.prompts]
    if not call.only_scores:
        tasks = [asyncio.ensure_future(service.answers(request, ENDPOINT, call.name)) for request in call.requests]
        try:
            answers = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
    choices = []
    if call.prompt_top is not None:
        of_prompts = await written(service, call.prompts, of_prompts, call.prompt_top)
    for number, request in enumerate(call.requests):
        of_prompt = answers[number] or [None] * request.n
        for place, answer in enumerate(of_prompt):
            one = _choice(call, number, number * request.n + place, answer, scores[number])
            choices.append(one | ({PROMPT_LOGPROBS: of_prompts[number]} if of_prompts else {}))
    answered = sum(len(a.tokens) for group in answers for a in group)
    return service.frame(call.name, KIND) | {
        "choices": choices,
        "usage": usage_of(sum(map(len, call.prompts)), answered),
    }


def _choice(
    call: CompletionCall, number: int, index: int, answer: Answer | None, scores: Sequence[TokenScore]
) -> dict[str, Any]:
    tokenizer, prompt = call.service.prompts.tokenizer, call.prompts[number]
    given, before = call.given[number], ""
    if call.echo:
        before = given if isinstance(given, str) else tokenizer.decode(list(prompt), skip_special_tokens=False)
    found: dict[str, Any] = {
        "index": index,
        "text": before + ("" if answer is None else answer.text),
        "finish_reason": "length" if answer is None else reason_of(answer),
        "logprobs": None,
    }
    if call.num_top is not None:
        told = CompletionLogprobs(tokenizer, prompt)
        echoed = {}
        if call.echo:
            echoed = told.echo(list(zip(prompt, [None, *scores], strict=True)), _num_added(tokenizer, given, prompt[0]))
        of_answer = told.of(() if answer is None else answer.tokens)
        found["logprobs"] = {name: [*echoed.get(name, ()), *values] for name, values in of_answer.items()}
    return found


def _num_added(tokenizer: Any, given: Any, first: int) -> int:
    """Tokens that the tokenizer put before the text that was sent: its start token, or none."""
    is_special = isinstance(given, str) and first in tokenizer.all_special_ids
    return int(is_special and not given.startswith(tokenizer.decode([first])))


async def events(call: CompletionCall) -> AsyncGenerator[dict[str, str], None]:
    """Server-sent events of all prompts as they come, ending with [DONE]."""
    frame, written = call.service.frame(call.name, KIND), 0
    tokenizer = call.service.prompts.tokenizer
    told: dict[int, CompletionLogprobs] = {}

    def cost() -> dict[str, Any]:
        return usage_of(sum(map(len, call.prompts)), written)

    async with aclosing(_merged(call)) as items:
        async for number, item in items:
            index = number * call.requests[number].n + item.choice
            if isinstance(item, Answer):
                if failure := failure_of(item):
                    yield {"data": json.dumps(failure.body())}
                    break
                text, reason, tokens = "", reason_of(item), ()
            else:
                written += len(item.tokens)
                text, reason, tokens = item.text, None, item.tokens
                if not text and not tokens:
                    continue
            logprobs = None
            if call.num_top is not None and tokens:
                if index not in told:
                    told[index] = CompletionLogprobs(tokenizer, call.prompts[number])
                logprobs = told[index].of(tokens)
            one = {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}
            usage = {} if call.usage == "never" else {"usage": cost() if call.usage == "always" else None}
            yield {"data": json.dumps(frame | {"choices": [one]} | usage)}
    if call.usage != "never":
        yield {"data": json.dumps(frame | {"choices": [], "usage": cost()})}
    yield {"data": "[DONE]"}


async def _merged(call: CompletionCall) -> AsyncGenerator[tuple[int, Piece | Answer], None]:
    """Pieces and answers of all prompts as they come, each with its prompt's number."""
    streams = [call.service.stream(request, ENDPOINT, call.name) for request in call.requests]
    if len(streams) == 1:
        async with aclosing(streams[0]) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Piece | Answer | Exception | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[Piece | Answer, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    queue.put_nowait((number, item))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.ensure_future(pump(number, stream)) for number, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
