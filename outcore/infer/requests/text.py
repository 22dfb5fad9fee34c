"""Text of an answer while its tokens arrive: only what later tokens cannot change, and nothing of a stop text.

Tokens are pieces of bytes: a letter may need several, and a tokenizer joins words by what stood before. So the tokens
since the last settled place are decoded together with those just before them, and text ends where a letter is not whole
yet. What could be the beginning of a stop text is held back until it is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

UNFINISHED = "�"
"""Letter that decoding gives for bytes that are no whole one yet."""
MAX_HELD_TOKENS = 8
"""Bytes that no further token makes whole (a letter has at most four) are said as they are."""


class TextStream:
    """Text of one answer. `add` tokens, `finish` once. `before`: tokens that it goes on from; some tokenizers
    (SentencePiece's) leave out the blank before a text's first word, which is none behind others."""

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), before: Sequence[int] = (), *, keeps_special: bool = False
    ) -> None:
        self._to_text, self._stops, self._skips_special = _to_text(tokenizer), tuple(stops), not keeps_special
        self._tokens = list(before[-MAX_HELD_TOKENS:])
        if self._tokens and self._decode(self._tokens).endswith(UNFINISHED):
            self._tokens = []
        self._context, self._settled = 0, len(self._tokens)
        """Tokens before `_settled` are told; those from `_context` on are decoded with the rest."""
        self._held = ""
        self.is_stopped = False
        """Whether a stop text has come; what follows it is dropped."""
        self.stop: str | None = None
        self.length = 0
        """Letters given out so far."""

    def add(self, tokens: Sequence[int], *, may_stop: bool = True) -> str:
        """More text, perhaps none yet. `may_stop`: stop texts count in it."""
        text = ""
        for token in tokens:  # one by one: a stop text ends the answer at a certain token
            if self.is_stopped:
                break
            self._tokens.append(token)
            text += self._released(self._new_text(), may_stop=may_stop)
        return text

    def finish(self) -> str:
        """The rest, once no token follows."""
        if self.is_stopped:
            return ""
        rest = self._released(self._new_text(is_last=True))
        held, self._held = self._held, ""
        self.length += len(held)
        return rest + held

    def _decode(self, tokens: list[int]) -> str:
        return self._to_text(tokens, skip_special_tokens=self._skips_special)

    def _new_text(self, *, is_last: bool = False) -> str:
        before = self._decode(self._tokens[self._context : self._settled])
        whole = self._decode(self._tokens[self._context :])
        pending = len(self._tokens) - self._settled
        if whole.endswith(UNFINISHED) and not is_last and pending <= MAX_HELD_TOKENS:
            return ""
        if len(whole) <= len(before):
            return ""
        self._context, self._settled = self._settled, len(self._tokens)
        return whole[len(before) :]

    def _released(self, new: str, *, may_stop: bool = True) -> str:
        """Release the part of the held and the new text that surely belongs to no stop text."""
        if not self._stops or not may_stop:
            self.length += len(new)
            return new
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, self.stop = min(found)
            self.is_stopped, self._held = True, ""
            self.length += at
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        self.length += len(text) - keep
        return text[: len(text) - keep]


def _to_text(tokenizer: Any) -> Any:
    """The tokenizer's `decode`, without transformers' wrapping where that changes nothing: it takes as long again, and
    every token of every answer is decoded twice."""
    is_plain = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
    if is_plain and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode
    return None if tokenizer is None else tokenizer.decode


def _overlap(text: str, stop: str) -> int:
    """Letters at the end of `text` that begin `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
