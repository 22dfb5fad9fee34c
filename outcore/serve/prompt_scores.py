"""`prompt_logprobs` of completions and chats, in vLLM's shape: how likely each token of the prompt was, and the
likeliest tokens at its place. A teacher is asked so by those who distill from a server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from outcore.infer import Request
from outcore.infer.commands import text_of
from outcore.infer.passes import TextScores
from outcore.serve.errors import bad
from outcore.serve.service import Service

PROMPT_LOGPROBS = "prompt_logprobs"
MOST_TOP = 1024
"""Likeliest tokens at each place."""
MOST_ENTRIES = 1_000_000
"""Log-probabilities in one answer, some 60 bytes of JSON each."""

Entries = list[dict[str, dict[str, Any]] | None]


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
    entries = sum(request.n * len(request.prompt) for request in requests) * (wanted + 1)
    if entries > MOST_ENTRIES:
        raise bad(
            f"{PROMPT_LOGPROBS} {wanted} of these prompts would be {entries:,} log-probabilities, and an answer has "
            f"{MOST_ENTRIES:,} at most. Ask for fewer prompts at a time, or fewer tokens at each place.",
            PROMPT_LOGPROBS,
        )
    return wanted


async def prompt_logprobs(service: Service, prompts: Sequence[Sequence[int]], num_top: int) -> list[Entries]:
    """For each prompt what stands in the answer: null for its first token, then token id -> log-probability, rank and
    text, the prompt's own token first."""
    scores = await service.thread.score(prompts, max(2, num_top))  # the rank is found with two or more
    texts = cache(lambda token: text_of(service.prompts.tokenizer, token))
    # On a thread: a million entries take seconds, in which others are answered.
    return await asyncio.to_thread(lambda: [_told(*pair, num_top, texts) for pair in zip(prompts, scores, strict=True)])


def _told(prompt: Sequence[int], scores: TextScores, num_top: int, text: Any) -> Entries:
    found: Entries = [None]
    for token, score in zip(prompt[1:], scores, strict=True):
        top = enumerate(score.top[:num_top], 1)
        entries = [(token, score.logprob, score.rank), *((other, value, rank) for rank, (other, value) in top)]
        at_place: dict[str, dict[str, Any]] = {}
        for other, value, rank in entries:
            at_place.setdefault(str(other), {"logprob": value, "rank": rank, "decoded_token": text(other)})
        found.append(at_place)
    return found
