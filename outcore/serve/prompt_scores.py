"""`prompt_logprobs` of completions and chats, in vLLM's shape: how likely each token of the prompt was, and the
likeliest tokens at its place. A teacher is asked so by those who distill from a server."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from outcore.infer import Request
from outcore.infer.commands import text_of
from outcore.infer.passes import TextScores
from outcore.serve.errors import bad
from outcore.serve.service import Service

PROMPT_LOGPROBS = "prompt_logprobs"
MOST_TOP = 1024
"""Likeliest tokens at each place."""
MOST_ENTRIES = 400_000
"""Log-probabilities in one answer, some 80 bytes of JSON each: 20 at each place of a row of 16,384 tokens."""
ENTRIES_A_PLACE = 10_000
"""So many take another place in the queue."""
PIECE_BYTES = 1 << 16
"""Bytes of an answer that are handed over together. The next ones wait until the client has read most of these."""
COMPACT: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
"""JSON as starlette writes it."""


@dataclass(frozen=True)
class Written:
    """Part of an answer that is JSON already."""

    data: bytes


class SplicedJSON(JSONResponse):
    """JSON in which what is `Written` stands as it is: large parts are written before, on a thread, piece by piece.
    `held`: its places in the queue, given back once it was sent or its client is gone: until then it lies in RAM."""

    def __init__(
        self, content: Any, held: AsyncExitStack, headers: Mapping[str, str] | None = None, status_code: int = 200
    ) -> None:
        super().__init__(content, status_code, headers)
        self._held = held.pop_all()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for at in range(0, len(self.body) + PIECE_BYTES, PIECE_BYTES):  # the last piece is empty
                piece = self.body[at : at + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})

    def render(self, content: Any) -> bytes:
        parts: list[bytes] = []
        mark = secrets.token_hex(16)  # no text of an answer holds it

        def stand_in(value: object) -> str:
            if not isinstance(value, Written):
                raise TypeError(f"{type(value).__name__} is not JSON")
            parts.append(value.data)
            return mark

        first, *rest = json.dumps(content, default=stand_in, **COMPACT).encode().split(f'"{mark}"'.encode())
        return b"".join([first, *(piece for pair in zip(parts, rest, strict=True) for piece in pair)])


def prompt_top(service: Service, fields: Mapping[str, Any], requests: Sequence[Request]) -> int | None:
    """Read how many likeliest tokens each place of the prompts is to get; None: no scores at all. ApiError for what
    cannot be given."""
    wanted = fields.get(PROMPT_LOGPROBS)
    if wanted is None:
        return None
    most = min(MOST_TOP, service.thread.engine.speech.vocab_size)
    if type(wanted) is not int or not 0 <= wanted <= most:
        raise bad(f"{PROMPT_LOGPROBS} must be a whole number from 0 to {most}.", PROMPT_LOGPROBS)
    if fields.get("stream"):
        raise bad(f"{PROMPT_LOGPROBS} does not go with stream: true: ask without streaming.", PROMPT_LOGPROBS)
    service.check_whole()
    entries = _entries_of(requests, wanted)
    if entries > MOST_ENTRIES:
        raise bad(
            f"{PROMPT_LOGPROBS} {wanted} of these prompts would be {entries:,} log-probabilities, and an answer has "
            f"{MOST_ENTRIES:,} at most. Ask for fewer prompts at a time, or fewer tokens at each place.",
            PROMPT_LOGPROBS,
        )
    return wanted


def places_of(service: Service, requests: Sequence[Request], num_top: int | None) -> int:
    """Count the places that these take, with their scores, which wait in RAM for the answers."""
    entries = 0 if num_top is None else _entries_of(requests, num_top)
    return max(len(requests), min(entries // ENTRIES_A_PLACE, service.settings.max_queue))


def _entries_of(requests: Sequence[Request], num_top: int) -> int:
    return sum(request.n * len(request.prompt) for request in requests) * (num_top + 1)


async def scores_of(service: Service, prompts: Sequence[Sequence[int]], num_top: int) -> list[TextScores]:
    """Score the prompts. As tensors, because these wait in RAM for the answers: written they take 7 times as much."""
    return await service.thread.score(prompts, max(2, num_top))  # the rank is found with two or more


async def written(
    service: Service, prompts: Sequence[Sequence[int]], scores: Sequence[TextScores], num_top: int
) -> list[Written]:
    """For each prompt what stands in the answer: null for its first token, then token id -> log-probability, rank and
    text, the prompt's own token first."""
    texts = cache(lambda token: text_of(service.prompts.tokenizer, token))

    def write() -> list[Written]:
        return [Written(_told(*pair, num_top, texts)) for pair in zip(prompts, scores, strict=True)]

    # Beside the loop, because it takes seconds, and one answer at a time, because each takes tens of MB.
    return await asyncio.get_running_loop().run_in_executor(service.writer, write)


def _told(prompt: Sequence[int], scores: TextScores, num_top: int, text: Any) -> bytes:
    found = [b"null"]
    for place, token in enumerate(prompt[1:]):
        score = scores[place]  # one by one: objects of all places would take more than their JSON
        top = enumerate(score.top[:num_top], 1)
        entries = [(token, score.logprob, score.rank), *((other, value, rank) for rank, (other, value) in top)]
        at_place: dict[str, dict[str, Any]] = {}
        for other, value, rank in entries:
            at_place.setdefault(str(other), {"logprob": value, "rank": rank, "decoded_token": text(other)})
        # A call of json.dumps lets no other thread run until it has ended.
        found.append(json.dumps(at_place, **COMPACT).encode())
    return b"[" + b",".join(found) + b"]"
