"""Prompts as tokens: plain text, or messages through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outcore.data.chat import ensure_chat_template


class Prompts:
    """What turns texts and messages into tokens for one model. `note` says what was missing; '' when nothing was."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.has_own_template = getattr(tokenizer, "chat_template", None) is not None
        self.note = ""
        if not self.has_own_template:
            ensure_chat_template(tokenizer)
            self.note = "the model has no chat template of its own; ChatML is used, which it may not know"

    def of_text(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, with what the tokenizer puts before it. ValueError for none."""
        ids = list(self.tokenizer(_encodable(text))["input_ids"])
        if not ids:
            start = self.tokenizer.bos_token_id
            start = self.tokenizer.eos_token_id if start is None else start
            if start is None:
                raise ValueError("the prompt is empty, and the tokenizer has no start token. Give a prompt with text.")
            ids = [start]
        return tuple(ids)

    def of_messages(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> tuple[int, ...]:
        """Tokens of a conversation, up to where the answer begins; `more`: what the template takes (tools, ...).
        ValueError in words for messages that the template does not take."""
        text = _encodable(self.text_of(messages, **more))
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text_of(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """The conversation as the model reads it."""
        plain = [_plain(message) for message in messages]
        if not plain:
            raise ValueError("messages is empty: give at least one.")
        try:
            return self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True, **more)
        except Exception as error:  # a template is a program of its own and may raise anything
            raise ValueError(f"the model's chat template does not take these messages: {error}") from error


def _encodable(text: str) -> str:
    """The text; ValueError for what no tokenizer takes, as a terminal's or a command line's odd bytes become."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds bytes that are no UTF-8, or half of a letter (a lone surrogate).") from None
    return text


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its content as one text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError("a message must be an object with a role.")
    found = dict(message)
    if found["role"] == "developer":
        found["role"] = "system"
    content = found.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
                texts.append(str(part.get("text", "")))
            else:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise ValueError(f"a message holds content of type {kind!r}; this model reads text only.")
        found["content"] = "".join(texts)
    elif content is None:
        if found["role"] != "assistant":  # who may have called functions only
            raise ValueError(f"a message of the role {found['role']!r} has no content.")
        found["content"] = ""
    elif not isinstance(content, str):
        raise ValueError("a message's content must be a text or a list of parts.")
    return found
