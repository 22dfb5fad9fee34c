"""Prompts as tokens: plain text, or messages through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outcore.apart import Ask, Bench
from outcore.data.chat import ensure_chat_template


class Prompts:
    """Maker of tokens from texts and messages for one model. `ask`: does the work in a process that can be given up;
    None: in this one. `note` says what was missing; '' when nothing was."""

    def __init__(self, tokenizer: Any, ask: Ask | None = None) -> None:
        self.tokenizer = tokenizer
        self.learned: dict[str, Any] = {}
        """Styles of calls (`chats.style`) by the text of the chat template that they were learned from."""
        self.note = ""
        if getattr(tokenizer, "chat_template", None) is None:
            ensure_chat_template(tokenizer)
            self.note = "the model has no chat template of its own; ChatML is used, which it may not know"
        self.ask: Ask = ask or Bench(tokenizer).ask

    def of_text(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, with what the tokenizer puts before it. ValueError for none."""
        return self.of_texts([text])[0]

    def of_texts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Tokens of several texts."""
        return [tuple(ids or [self._start()]) for ids in self.ask("texts", texts, True)]

    def of_pairs(self, query: str, documents: Sequence[str]) -> list[tuple[int, ...]]:
        """Tokens of a query with each document behind it."""
        return [tuple(ids or [self._start()]) for ids in self.ask("pairs", query, documents)]

    def _start(self) -> int:
        start = self.tokenizer.bos_token_id
        start = self.tokenizer.eos_token_id if start is None else start
        if start is None:
            raise ValueError("the prompt is empty, and the tokenizer has no start token. Give a prompt with text.")
        return start

    def of_messages(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Tokens of a conversation, up to where the answer begins. ValueError in words for messages that the template
        does not take."""
        return self.of_chat(messages)[1]

    def of_chat(
        self, messages: Any, tools: list[Any] | None = None, goes_on: bool = False, **variables: Any
    ) -> tuple[str, tuple[int, ...], dict[str, Any]]:
        """Conversation as the model reads it, its tokens, and what a model that sees reads of its pictures;
        `variables`: what the template takes beside. `goes_on`: the answer goes on with the last message."""
        text, ids, seen = self.ask("prompt", messages, tools, variables, goes_on)
        return text, tuple(ids), seen
