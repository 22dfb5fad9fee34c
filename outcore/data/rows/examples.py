"""The three things that a row can become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TextExample:
    """Plain text, all of it trained on; or, with `prompt`, a completion after a prompt."""

    text: str
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class ChatExample:
    """Messages with `role` and `content`, for the tokenizer's chat template."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    untrained: frozenset[int] = frozenset()
    """Numbers of assistant messages, from 0, that carry no loss: those of a prompt, or marked so by the row."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template (`chat_template_kwargs`), e.g. enable_thinking."""


@dataclass(frozen=True, slots=True)
class TokensExample:
    """Tokens made elsewhere, and which of them carry loss. Nothing is added to them."""

    ids: list[int]
    has_loss: list[bool]


Example = TextExample | ChatExample | TokensExample
