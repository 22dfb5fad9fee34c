"""Lines of a job's input as requests, and answers as lines: our plain shape, or OpenAI's of a batch.

    {"prompt": "..."}  or  {"messages": [...], "tools": [...]}, with sampling fields beside it
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

A line that cannot be answered gets a result that says why; the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from outcore.common.files import json_of
from outcore.common.words import did_you_mean
from outcore.data.rows import COMPLETION_COLUMNS
from outcore.infer.chats import CHAT_FIELDS, Chat, Parsed, request_of
from outcore.infer.commands.logprobs import of_chat, of_completion
from outcore.infer.requests import KNOWN, Answer, Chosen, Grammars, Prompts, Request, Sampling, sampling_of

URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
BESIDE = frozenset(
    {"prompt", "model", "n", "id", "stream", "user", "metadata", "store", "safety_identifier", "response_format"}
    | set(COMPLETION_COLUMNS)
)
"""Fields of a line that are not about sampling; answers that stand beside a prompt, as in data to train on, are not
read."""


@dataclass(frozen=True)
class Line:
    """One line of the input, understood."""

    number: int
    shape: str
    """plain, /v1/chat/completions, /v1/completions, or batch where it is neither."""
    name: Any
    """The line's own id, for its result."""
    request: Request | None
    error: str = ""
    chat: Chat | None = None
    """Chat that reads its answers, where it has messages."""


def numbered(source: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of every line that is not blank; bytes that are no UTF-8 are found by who reads the line."""
    number = 0
    with open(source, encoding="utf-8-sig", errors="surrogateescape") as file:
        for text in file:
            if text.strip():
                yield number, text
                number += 1


def read_line(
    number: int,
    text: str,
    prompts: Prompts,
    grammars: Grammars,
    defaults: Callable[[int], Sampling],
    request_name: str = "",
    check: Callable[[Mapping[str, Any]], None] = lambda body: None,
) -> Line:
    """Understand one line; what is wrong with it stands in the result. Without a seed the request's name is it.
    `defaults`: how tokens are chosen for a prompt of so many, where the line does not say; `check`: ValueError for
    what the line asks of somebody else."""
    shape, name = "plain", None
    try:
        entry = json_of(text)
        if not isinstance(entry, dict):
            raise ValueError("a line must be a JSON object")
        name = entry.get("custom_id", entry.get("id"))
        body = entry
        if "body" in entry or "url" in entry:
            shape = "batch"
            shape, body = batch_body(entry)
        check(body)
        if body.get("stream"):
            raise ValueError("a job's answers are not streamed: leave stream out")
        request, chat = understand(body, request_name or f"line-{number}", prompts, grammars, defaults)
        return Line(number, shape, name, request, chat=chat)
    except JSONDecodeError as error:
        return Line(number, shape, name, None, f'the line is no JSON ({error}); it should be {{"prompt": "..."}}')
    except (ValueError, TypeError) as error:
        return Line(number, shape, name, None, str(error))


def understand(
    body: Mapping[str, Any], name: str, prompts: Prompts, grammars: Grammars, defaults: Callable[[int], Sampling]
) -> tuple[Request, Chat | None]:
    """The request that a body asks for, and what reads its answers where it has messages. `defaults`: how tokens are
    chosen for a prompt of so many, where the body does not say. ValueError or TypeError for what cannot be."""
    if (body.get("messages") is None) == (body.get("prompt") is None):
        found = ", ".join(sorted(map(str, body))) or "none"
        raise ValueError(f"a line must have either prompt or messages; its fields: {found[:200]}")
    chat = None if body.get("messages") is None else Chat(prompts, body)
    unknown = sorted(set(body) - KNOWN - BESIDE - (CHAT_FIELDS if chat else {"messages"}))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}.{did_you_mean(unknown[0], KNOWN | CHAT_FIELDS)}")
    ids = _prompt_of(body, prompts, chat)
    return request_of(body, name, ids, sampling_of(body, defaults(len(ids))), grammars, chat), chat


def batch_body(entry: Mapping[str, Any], urls: Mapping[str, str] = URLS) -> tuple[str, dict[str, Any]]:
    """(url, body) of a batch's line; ValueError for another than one of `urls` (url -> what its body must have)."""
    url, body, method = entry.get("url"), entry.get("body"), entry.get("method", "POST")
    if not isinstance(url, str) or url not in urls:
        raise ValueError(f"url is {url!r}, but must be one of {', '.join(urls)}")
    if method != "POST":
        raise ValueError(f"method is {method!r}, but must be POST")
    if not isinstance(body, dict):
        raise ValueError("body must be an object")
    if body.get(urls[url]) is None:
        raise ValueError(f"body must have {urls[url]} for {url}")
    return url, body


def _prompt_of(body: Mapping[str, Any], prompts: Prompts, chat: Chat | None) -> tuple[int, ...]:
    if chat is not None:
        return chat.ids
    prompt = body["prompt"]
    if isinstance(prompt, str):
        return prompts.of_text(prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise ValueError("prompt must be a text or a list of token ids")


def result_of(line: Line, answers: Sequence[Answer], tokenizer: Any, model: str, created: int) -> dict[str, Any]:
    """Make the output of one line; nothing in it depends on when it was made."""
    if line.request is None:
        return failure_of(line, line.error)
    if failed := next((a for a in answers if a.finish in ("error", "cancelled")), None):
        if failed.finish == "cancelled":
            return failure_of(line, "the request was cancelled", 409, "conflict_error")
        return failure_of(line, failed.error, 500, "server_error")
    ordered = sorted(answers, key=lambda a: a.choice)
    parts = [_parts_of(line, a) for a in ordered]
    usage = {"prompt_tokens": len(line.request.prompt), "completion_tokens": sum(len(a.tokens) for a in ordered)}
    usage["total_tokens"] = sum(usage.values())
    if line.shape == "plain":
        found: dict[str, Any] = {} if line.name is None else {"id": line.name}
        found |= {"text": parts[0].content} if len(parts) == 1 else {"texts": [p.content for p in parts]}
        found |= {"finish_reason": parts[0].finish(ordered[0].finish), "usage": usage}
        found |= _beside("reasoning_content", [p.reasoning for p in parts])
        found |= _beside("tool_calls", [p.tool_calls for p in parts])
        return found | _token_logprobs(ordered)
    is_chat = line.shape == "/v1/chat/completions"
    of_answer = of_chat if is_chat else _of_completion
    choices = [
        {"index": a.choice, "finish_reason": p.finish(a.finish), "logprobs": of_answer(tokenizer, a.tokens)}
        | ({"message": p.message()} if is_chat else {"text": a.text})
        for a, p in zip(ordered, parts, strict=True)
    ]
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{line.number}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage,
    }
    return body_of(line.number, line.name, body)


def body_of(number: int, name: Any, body: dict[str, Any]) -> dict[str, Any]:
    """The result of a batch's line that was answered with this body."""
    response = {"status_code": 200, "request_id": f"req-{number}", "body": body}
    return {"id": f"batch_req_{number}", "custom_id": name, "response": response, "error": None}


def _parts_of(line: Line, answer: Answer) -> Parsed:
    if line.chat is None:
        return Parsed(answer.text)
    return line.chat.parts_of(f"{answer.request}-{answer.choice}", answer.text)


def _beside(name: str, values: list[Any]) -> dict[str, Any]:
    """A field of a plain result, where an answer has it; a list where there are several answers."""
    return {name: values[0] if len(values) == 1 else values} if any(values) else {}


def _token_logprobs(answers: Sequence[Answer]) -> dict[str, Any]:
    if not any(a.tokens and a.tokens[0].logprob is not None for a in answers):
        return {}
    return _beside("token_logprobs", [[c.logprob for c in a.tokens] for a in answers])


def _of_completion(tokenizer: Any, tokens: Sequence[Chosen]) -> dict[str, Any] | None:
    return of_completion(tokenizer, tokens) if tokens and tokens[0].logprob is not None else None


def failure_of(line: Line, why: str, status: int = 400, kind: str = "invalid_request_error") -> dict[str, Any]:
    """The result of a line that has no answer, in the shape of its input."""
    if line.shape == "plain":
        return ({} if line.name is None else {"id": line.name}) | {"error": why}
    body = {"error": {"message": why, "type": kind, "param": None, "code": None}}
    response = {"status_code": status, "request_id": f"req-{line.number}", "body": body}
    return {
        "id": f"batch_req_{line.number}",
        "custom_id": line.name,
        "response": response,
        "error": {"code": kind.removesuffix("_error"), "message": why},
    }
