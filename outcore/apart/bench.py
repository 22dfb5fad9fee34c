"""Work that turns a client's text into tokens for one model, and tries the forms that answers are to have.

Conversations are read and written as in training: the same reading of messages, the same form of each template."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from outcore.data.chat import ChatEncoder, ensure_chat_template
from outcore.data.rows import ChatExample, read_messages

Ask = Callable[..., Any]
"""Calls a method of a `Bench`, here or elsewhere: (name, *arguments)."""

JSON_OPTIONS = MappingProxyType({"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?", "coerce_one_of": True})
"""Options for JSON in answers: few blanks between its parts, as llama.cpp allows them, because a small model may write
nothing else for ever. oneOf is read as anyOf: no form can tell that two do not fit."""
TRIED_TOKENS = 64
"""Tokens that a form is tried with: what it cannot go on from shows in the first few."""
PIECE_CHARS = 1 << 16
"""Longer texts are read in such pieces first, until it is known that they are too long: what a tokenizer makes of
15 MB takes 20 s."""
CUT_TOKENS = 64
"""Tokens that a cut between two pieces may add."""
TEXT_ONLY = "text only"
TOO_LONG = "tokens, more than is read here"
"""Words of the refusal of such a text."""
MASK_S = 0.25
"""Seconds that a token may take, because everyone's answers wait for it; twice that for the first, which learns."""


class Bench:
    """Works for one model. Every method raises ValueError, in words, for what cannot be. `most_tokens`: longer texts
    are refused, without reading them whole."""

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int] = (), most_tokens: int | None = None) -> None:
        ensure_chat_template(tokenizer)
        self.tokenizer, self._ends, self._most_tokens = tokenizer, list(end_tokens), most_tokens
        self._encoder: ChatEncoder | None = None
        self._for_forms: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        # what was learned of a template is no thing to send
        return Bench, (self.tokenizer, self._ends, self._most_tokens)

    def ask(self, name: str, *args: Any, limit_s: float | None = None) -> Any:
        """Call a method by its name, here, where no limit of time is kept."""
        return getattr(self, name)(*args)

    def prompt(
        self, messages: Any, tools: list[Any] | None, variables: Mapping[str, Any], goes_on: bool
    ) -> tuple[str, list[int], dict[str, Any]]:
        """Text and tokens of a conversation, up to where the answer begins, or where the last message goes on; and what
        a model that sees reads beside them, which one of text does not."""
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages is empty: give at least one.")
        read, _ = read_messages([plain_message(message) for message in messages], "messages")
        if self._encoder is None:
            self._encoder = ChatEncoder(self.tokenizer, train_on_all=True)
        example = ChatExample(read, tools or None, variables=variables)
        text = self._encoder.template(example).prompt(example, goes_on=goes_on)
        return text, self._ids(text, False), {}

    def pairs(self, first: str, seconds: Sequence[str]) -> list[list[int]]:
        """Tokens of one text with each of the others behind it, as the tokenizer joins two."""
        for text in (first, *seconds):
            self._check(text)
        return [list(self.tokenizer(first, second)["input_ids"]) for second in seconds]

    def texts(self, texts: Sequence[str], with_special: bool) -> list[list[int]]:
        """Tokens of each text. `with_special`: what the tokenizer puts before and behind it, too."""
        return [self._ids(text, with_special) for text in texts]

    def _ids(self, text: str, with_special: bool) -> list[int]:
        self._check(text)
        return list(self.tokenizer(text, add_special_tokens=with_special)["input_ids"])

    def _check(self, text: str) -> None:
        """ValueError for a text that is none, or that has far too many tokens: known before all of it became some."""
        _encodable(text)
        found, most = 0, self._most_tokens
        for start in range(0, len(text), PIECE_CHARS) if most and len(text) > PIECE_CHARS else ():
            piece = text[start : start + PIECE_CHARS]
            found += len(self.tokenizer(piece, add_special_tokens=False)["input_ids"]) - CUT_TOKENS
            if most and found > most:
                raise ValueError(f"The text has more than {most:,} {TOO_LONG}. Shorten it.")

    def decoded(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones, too."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def ready_for_forms(self) -> None:
        """Learn the vocabulary as forms need it, once: seconds for a large one, which are no form's fault."""
        if self._for_forms is None:
            self._for_forms = for_forms(self.tokenizer, self._ends)

    def try_form(self, text: str) -> None:
        """Refuse a form that does not compile, that no answer can have, or that takes too long a token."""
        self.ready_for_forms()
        trial_of_form(self._for_forms, text)


def for_forms(tokenizer: Any, end_tokens: Sequence[int]) -> Any:
    """The tokenizer as llguidance knows it."""
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, eos_token=list(end_tokens) or None)


def trial_of_form(tokenizer: Any, text: str) -> None:
    """Write an answer of this form by chance. ValueError where that fails or takes too long."""
    from llguidance import LLMatcher

    matcher, draw = LLMatcher(tokenizer, text, log_level=0), random.Random(0)
    began_s = time.thread_time()
    for count in range(TRIED_TOKENS):
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(first_line(matcher.get_error()))
        if time.thread_time() - began_s > MASK_S * (count + 2):
            raise ValueError(f"it takes more than {MASK_S:g} s a token. Make it simpler.")
        if matcher.is_stopped():
            return
        matcher.consume_token(_drawn(mask, draw))


def _drawn(mask: bytes, draw: random.Random) -> int:
    """One of the tokens that a mask allows: the first behind a random place."""
    bits, at = int.from_bytes(mask, "little"), draw.randrange(8 * len(mask))
    behind = bits >> at
    found = behind or bits
    return (at if behind else 0) + (found & -found).bit_length() - 1


def too_long_code(error: Exception) -> str | None:
    """OpenAI's code for a text of more tokens than are read; None for other errors."""
    return "context_length_exceeded" if TOO_LONG in str(error) else None


def first_line(error: str) -> str:
    """Take from an error the line that says what went wrong, without the state that llguidance adds."""
    return error.strip().splitlines()[0] if error.strip() else "no answer can have it"


def plain_message(message: Any, reads: str = TEXT_ONLY) -> Any:
    """A message whose content is one text, however the client's library writes it. `reads`: what the model reads."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError("a message must be an object with a role.")
    content, refusal = message.get("content"), message.get("refusal")
    if content is None and isinstance(refusal, str):
        content = refusal
    if content is None and message["role"] != "assistant":  # who may have called functions only
        raise ValueError(f"a message of the role {message['role']!r} has no content.")
    if isinstance(content, list):
        content = "".join(_text_of_part(part, reads) for part in content)
    if not isinstance(content, str | None):
        raise ValueError("a message's content must be a text or a list of parts.")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise ValueError("tool_calls must be a list of calls, each with the name of its function.")
    return {key: value for key, value in message.items() if key != "refusal"} | {"content": content}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _text_of_part(part: Any, reads: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("refusal" if kind == "refusal" else "text", "") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
        raise ValueError(f"a message holds content of type {kind!r}; this model reads {reads}.")
    return text


def _encodable(text: str) -> None:
    """ValueError for what no tokenizer takes, as a terminal's or a command line's odd bytes become."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds bytes that are no UTF-8, or half of a letter (a lone surrogate).") from None
