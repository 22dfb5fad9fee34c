"""Results that an `LLM` gives back; names are vLLM's where vLLM has one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outcore.infer import Answer, Piece
from outcore.infer.chats import AnswerParser, Chat, TemplateParser


@dataclass(frozen=True)
class CompletionOutput:
    """One answer, or a piece of it as it comes."""

    index: int
    """Number of the choice, where several were asked for."""
    text: str
    """Words that are said: of a chat without thoughts and calls of tools."""
    token_ids: tuple[int, ...]
    finish_reason: str | None
    """stop, length, or tool_calls; None of a piece that is not the last."""
    stop_reason: str | int | None = None
    """Text or token of `stop` and `stop_token_ids` that ended it."""
    logprobs: tuple[dict[int, float], ...] | None = None
    """For each token its own log-probability, first, and those of the likeliest; None where nobody asked for them."""
    message: Mapping[str, Any] | None = None
    """A chat's answer as OpenAI's message, with reasoning_content and tool_calls where it has them; of a piece, what is
    new."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the tokens."""
        if self.logprobs is None:
            return None
        return sum(of[token] for of, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True)
class RequestOutput:
    """Answers to one prompt."""

    prompt: str | None
    """Text of the prompt; None of tokens and chats."""
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]


@dataclass(frozen=True)
class ScoreOutput:
    """Log-probabilities of a text."""

    text: str
    token_ids: tuple[int, ...]
    """Tokens of all of it."""
    token_logprobs: tuple[float, ...]
    """Log-probability of each token that counts, given those before it: all but the first, or the completion's."""

    @property
    def logprob(self) -> float:
        """Sum over the tokens."""
        return sum(self.token_logprobs)

    @property
    def perplexity(self) -> float | None:
        """Number of tokens that the model is torn between, on average; None where no token counts."""
        return math.exp(-self.logprob / len(self.token_logprobs)) if self.token_logprobs else None


@dataclass(frozen=True)
class EmbeddingVector:
    """A text as numbers."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingOutput:
    """One text's vector."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingVector


@dataclass(frozen=True)
class Classification:
    """Probabilities of all labels, and the likeliest label."""

    label: str
    probs: list[float]


@dataclass(frozen=True)
class ClassificationOutput:
    """One text's labels."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    outputs: Classification


@dataclass(frozen=True)
class RerankOutput:
    """One document's relevance to the query."""

    index: int
    """Index of the document in the list that was given."""
    document: str
    relevance_score: float


def completion_of(
    item: Answer | Piece, chat: Chat | None = None, parser: AnswerParser | TemplateParser | None = None
) -> CompletionOutput:
    """A whole answer, told apart where it is a chat's, or a piece of one, through what has read the pieces before."""
    parts = None
    if chat is not None:
        parts = chat.parts_of(f"{item.request}-{item.choice}", item.text)
    elif parser is not None:
        parts = parser.add(item.text)
        if item.finish is not None:
            parts.take(parser.finish())
    text, finish, message = item.text, item.finish, None
    if parts is not None:
        text, message = parts.content, parts.message() if chat is not None else parts.fields()
        finish = None if finish is None else (parser.whole if parser else parts).finish(finish)
    asked = bool(item.tokens) and item.tokens[0].logprob is not None
    logprobs = tuple({c.token: c.logprob, **dict(c.top)} for c in item.tokens) if asked else None
    tokens = tuple(chosen.token for chosen in item.tokens)
    return CompletionOutput(item.choice, text, tokens, finish, item.stop, logprobs, message)
