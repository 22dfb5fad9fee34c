"""Answers that must have a form: JSON of a schema, a regular expression, a grammar; by the package llguidance.

A grammar is tried and compiled when a request is read, so what is wrong with it is told before anything runs. Each
answer has a matcher of its own, which tells after every token what may follow: on threads beside the engine's, while
the layers run. The package works without Python's lock.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch

from outcore.apart import JSON_OPTIONS, Ask, Bench, first_line, for_forms
from outcore.common.errors import need_packages

TYPES = ("text", "json_object", "json_schema", "regex", "grammar")
MASK_THREADS = 4
"""Answers whose masks are computed at a time."""
MASK_WAIT_S = 2.0
"""Seconds that a pass waits for a mask, with everyone's answers in it; it is some thousandths usually."""
MAX_LETTERS, COMPILE_S = 1 << 20, 5.0
"""Size of a form's description, and seconds until it is tried: five thousand properties take a tenth of either."""
KEPT = 64
"""Forms that are kept compiled: clients send the same ones again."""


class Grammar:
    """One form, compiled for one model."""

    def __init__(self, compiled: Any, threads: Executor, warnings: Iterable[str] = ()) -> None:
        self._compiled, self._threads = compiled, threads
        self.warnings = tuple(warnings)
        """Parts of the asked form that answers are not held to, in the package's words."""

    def matcher(self) -> Matcher:
        """One for each answer."""
        return Matcher(self._compiled.deep_copy(), self._threads)


class Matcher:
    """State of one answer in its form: what may follow. Between `begin` and the first `mask` the threads own it."""

    def __init__(self, matcher: Any, threads: Executor) -> None:
        self._matcher, self._threads = matcher, threads
        self._masks: Future[list[tuple[torch.Tensor, str]]] | None = None
        self.error = ""
        """Why the answer cannot go on in its form: a limit of the package was met. What follows means nothing."""

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Count these tokens up to the first that the form does not allow behind those before."""
        return self._matcher.validate_tokens(list(tokens))

    def begin(self, guesses: Sequence[int] = ()) -> None:
        """Have masks computed for the next place and those behind each of `guesses`, all of which the form allows."""
        self._masks = self._threads.submit(self._masks_of, list(guesses))

    def mask(self, place: int) -> torch.Tensor:
        """Bits of the tokens that may come behind so many guesses (uint8, the lowest bit first); the model's end token
        where the form is complete. Waits for the threads."""
        assert self._masks is not None
        try:
            bits, error = self._masks.result(MASK_WAIT_S)[place]
        except TimeoutError:
            bits, error = torch.tensor([255], dtype=torch.uint8), f"its next token took more than {MASK_WAIT_S:g} s"
        self.error = self.error or error
        return bits

    def take(self, token: int) -> None:
        """A token has come."""
        if not self.error:
            self._matcher.consume_token(token)
            self.error = _error_of(self._matcher)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more may come."""
        return not self.error and self._matcher.is_stopped()

    def _masks_of(self, guesses: list[int]) -> list[tuple[torch.Tensor, str]]:
        # The package's own rollback does not bring back a matcher that has taken the end token.
        ahead, masks = self._matcher.deep_copy() if guesses else self._matcher, [_mask_of(self._matcher)]
        for token in guesses:
            ahead.consume_token(token)
            masks.append(_mask_of(ahead))
        return masks


def _mask_of(matcher: Any) -> tuple[torch.Tensor, str]:
    """(bits, what went wrong); a matcher that goes wrong says that the answer may end."""
    bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
    return bits, _error_of(matcher)


def _error_of(matcher: Any) -> str:
    return first_line(matcher.get_error()) if matcher.is_error() else ""


class Grammars:
    """Compiles forms for one model. ValueError in words for what cannot be. `ask`: tries them where that can be given
    up, and harms nobody; None: here."""

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int], ask: Ask | None = None) -> None:
        self._source, self._ends = tokenizer, sorted(end_tokens)
        self._ask: Ask = ask or Bench(tokenizer, self._ends).ask
        self._tokenizer: Any = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(MASK_THREADS, "grammar")

    def of(self, response_format: Any, said_as: str = "response_format") -> Grammar | None:
        """The form that a request asks for; None for plain text. `said_as`: the field that says it."""
        if response_format is None:
            return None
        if not isinstance(response_format, Mapping) or response_format.get("type") not in TYPES:
            raise ValueError(f"response_format must be an object whose type is one of {', '.join(TYPES)}.")
        if response_format["type"] == "text":
            return None
        need_packages(("llguidance",), "response_format", "serve", ValueError)
        return self._compiled(response_format, said_as)

    def _compiled(self, wanted: Mapping[str, Any], said_as: str) -> Grammar:
        from llguidance import LLMatcher

        kind = wanted["type"]
        try:
            if kind in ("json_object", "json_schema"):
                schema = {"type": "object"} if kind == "json_object" else _schema_of(wanted)
                text = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": dict(JSON_OPTIONS)}))
            elif kind == "regex":
                text = LLMatcher.grammar_from_regex(_text_of(wanted, "pattern"))
            else:
                text = LLMatcher.grammar_from_lark(_text_of(wanted, "grammar"))
            return self._kept_or_made(text)
        except (ValueError, TypeError) as problem:
            raise ValueError(f"{said_as}: {problem}") from problem

    def _kept_or_made(self, text: str) -> Grammar:
        with self._lock:
            found = self._kept.pop(text, None)
        if found is None:
            if len(text) > MAX_LETTERS:
                raise ValueError(f"it has more than {MAX_LETTERS} letters. Make it simpler.")
            self._ask("ready_for_forms")
            self._ask("try_form", text, limit_s=COMPILE_S)
            found = self._made(text)
        with self._lock:
            self._kept[text] = found
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found

    def _made(self, text: str) -> Grammar:
        from llguidance import LLMatcher

        if self._tokenizer is None:
            self._tokenizer = for_forms(self._source, self._ends)
        warnings = LLMatcher.validate_grammar_with_warnings(text, self._tokenizer)[1]
        return Grammar(LLMatcher(self._tokenizer, text), self._threads, map(first_line, warnings))


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
