"""Answers that must have a form: JSON of a schema, a regular expression, a grammar; by the package llguidance.

A grammar is compiled when a request is read, so what is wrong with it is told before anything runs. Each answer has a
matcher of its own, which tells after every token what may follow.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import torch

PACKAGE = "llguidance"
TYPES = ("text", "json_object", "json_schema", "regex", "grammar")


class Grammar:
    """One form, compiled for one model."""

    def __init__(self, tokenizer: Any, text: str, vocab_size: int) -> None:
        self._tokenizer, self._text, self._vocab_size = tokenizer, text, vocab_size

    def matcher(self) -> Matcher:
        """One for each answer."""
        from llguidance import LLMatcher

        return Matcher(LLMatcher(self._tokenizer, self._text), self._vocab_size)


class Matcher:
    """What may follow in one answer."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def mask(self) -> torch.Tensor:
        """Bool [V]: tokens that may come now; the model's end token where the form is complete."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        flags = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        found = torch.zeros(self._vocab_size, dtype=torch.bool)
        known = flags.flatten()[: self._vocab_size].bool()
        found[: len(known)] = known
        return found

    def take(self, token: int) -> None:
        """A token has come."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more may come."""
        return self._matcher.is_stopped()


class Grammars:
    """Compiles forms for one model. ValueError in words for what cannot be."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: frozenset[int]) -> None:
        self._source, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(end_tokens)
        self._tokenizer: Any = None

    def of(self, response_format: Any) -> Grammar | None:
        """The form that a request's `response_format` asks for; None for plain text."""
        if response_format is None:
            return None
        if not isinstance(response_format, Mapping) or response_format.get("type") not in TYPES:
            raise ValueError(f"response_format must be an object whose type is one of {', '.join(TYPES)}.")
        if response_format["type"] == "text":
            return None
        if importlib.util.find_spec(PACKAGE) is None:
            raise ValueError(f"response_format needs the package {PACKAGE}: pip install -r requirements/serve.txt")
        return self._compiled(response_format)

    def _compiled(self, wanted: Mapping[str, Any]) -> Grammar:
        from llguidance import LLMatcher

        kind = wanted["type"]
        try:
            if kind == "json_object":
                text = LLMatcher.grammar_from_json_schema('{"type": "object"}')
            elif kind == "json_schema":
                text = LLMatcher.grammar_from_json_schema(json.dumps(_schema_of(wanted)))
            elif kind == "regex":
                text = LLMatcher.grammar_from_regex(_text_of(wanted, "pattern"))
            else:
                text = LLMatcher.grammar_from_lark(_text_of(wanted, "grammar"))
            error = LLMatcher.validate_grammar(text, self._ready())
        except (ValueError, TypeError) as problem:
            raise ValueError(f"response_format: {problem}") from problem
        if error:
            raise ValueError(f"response_format: {str(error).strip().splitlines()[0]}")
        return Grammar(self._ready(), text, self._vocab_size)

    def _ready(self) -> Any:
        """The tokenizer as llguidance knows it; made once."""
        if self._tokenizer is None:
            from llguidance.hf import from_tokenizer

            self._tokenizer = from_tokenizer(self._source, eos_token=list(self._ends) or None)
        return self._tokenizer


def _schema_of(wanted: Mapping[str, Any]) -> Any:
    inner = wanted.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ValueError("json_schema must be an object with a schema.")
    return schema


def _text_of(wanted: Mapping[str, Any], name: str) -> str:
    text = wanted.get(name)
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name} must be a text.")
    return text
