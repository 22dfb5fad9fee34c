"""Answers that must have a form: JSON of a schema, a regular expression, a grammar; by the package llguidance.

A grammar is compiled when a request is read, so what is wrong with it is told before anything runs. Each answer has a
matcher of its own, which tells after every token what may follow: on threads beside the engine's, while the layers run.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch

PACKAGE = "llguidance"
TYPES = ("text", "json_object", "json_schema", "regex", "grammar")
MASK_THREADS = 4
"""Answers whose masks are computed at a time; the package works without Python's lock."""

BLANKS = r"( |\n{1,2}[ \t]{0,20})?"
"""Blanks between the parts of a JSON text, as llama.cpp allows them: a small model may write nothing else for ever."""


class Grammar:
    """One form, compiled for one model."""

    def __init__(self, tokenizer: Any, text: str, threads: Executor) -> None:
        self._tokenizer, self._text, self._threads = tokenizer, text, threads

    def matcher(self) -> Matcher:
        """One for each answer."""
        from llguidance import LLMatcher

        return Matcher(LLMatcher(self._tokenizer, self._text), self._threads)


class Matcher:
    """What may follow in one answer. Between `begin` and the first `mask` it belongs to the threads."""

    def __init__(self, matcher: Any, threads: Executor) -> None:
        self._matcher, self._threads = matcher, threads
        self._masks: Future[list[torch.Tensor]] | None = None

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the form allows, one after the other."""
        return self._matcher.validate_tokens(list(tokens))

    def begin(self, guesses: Sequence[int] = ()) -> None:
        """Have masks computed for the next place and those behind each of `guesses`, all of which the form allows."""
        self._masks = self._threads.submit(self._masks_of, list(guesses))

    def mask(self, place: int) -> torch.Tensor:
        """Bits of the tokens that may come behind so many guesses (uint8, the lowest bit first); the model's end token
        where the form is complete. Waits for the threads."""
        assert self._masks is not None
        return self._masks.result()[place]

    def take(self, token: int) -> None:
        """A token has come."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more may come."""
        return self._matcher.is_stopped()

    def _masks_of(self, guesses: list[int]) -> list[torch.Tensor]:
        # The package's own rollback does not bring back a matcher that has taken the end token.
        ahead, bits = self._matcher.deep_copy() if guesses else self._matcher, [self._matcher.compute_bitmask()]
        for token in guesses:
            ahead.consume_token(token)
            bits.append(ahead.compute_bitmask())
        return [torch.frombuffer(bytearray(of_place), dtype=torch.uint8) for of_place in bits]


class Grammars:
    """Compiles forms for one model. ValueError in words for what cannot be."""

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int]) -> None:
        self._source, self._ends = tokenizer, sorted(end_tokens)
        self._tokenizer: Any = None
        self._threads = ThreadPoolExecutor(MASK_THREADS, "grammar")

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
            if kind in ("json_object", "json_schema"):
                schema = {"type": "object"} if kind == "json_object" else _schema_of(wanted)
                text = LLMatcher.grammar_from_json_schema(json.dumps(schema), {"whitespace_pattern": BLANKS})
            elif kind == "regex":
                text = LLMatcher.grammar_from_regex(_text_of(wanted, "pattern"))
            else:
                text = LLMatcher.grammar_from_lark(_text_of(wanted, "grammar"))
            error = LLMatcher.validate_grammar(text, self._ready())
        except (ValueError, TypeError) as problem:
            raise ValueError(f"response_format: {problem}") from problem
        if error:
            raise ValueError(f"response_format: {str(error).strip().splitlines()[0]}")
        return Grammar(self._ready(), text, self._threads)

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
