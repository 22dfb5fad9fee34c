"""Log-probabilities of an answer's tokens in OpenAI's shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from outcore.infer.passes import TokenScore
from outcore.infer.requests import Chosen, TextStream

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Letter that decoding gives for bytes that are no whole one."""
_SEEN = (*range(33, 127), *range(161, 173), *range(174, 256))
_UNSEEN = tuple(byte for byte in range(256) if byte not in _SEEN)
BYTE_LETTERS = MappingProxyType({chr(b): b for b in _SEEN} | {chr(256 + n): b for n, b in enumerate(_UNSEEN)})
"""Letter of a byte-level vocabulary -> its byte, as GPT-2 writes them: those that cannot be seen from 256 on."""
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
"""Letter that stands for a blank in SentencePiece's pieces."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""Form of SentencePiece's pieces of one byte, for letters that no other piece holds."""


def text_of(tokenizer: Any, token: int) -> str:
    """One token as text, as it reads behind others: with the blank that some tokenizers leave out of a first word."""
    text, piece = tokenizer.decode([token], skip_special_tokens=False), tokenizer.convert_ids_to_tokens(token)
    return f" {text}" if piece and piece.startswith(_BLANK) and len(text) < len(piece) else text


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """One token's own bytes, also where they are only a piece of a letter, of which no text can be made."""
    text = text_of(tokenizer, token)
    if UNFINISHED not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    if found := _BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(found[1])
    return bytes(BYTE_LETTERS[letter] for letter in piece) if set(piece) <= BYTE_LETTERS.keys() else text.encode()


def of_chat(tokenizer: Any, tokens: Sequence[Chosen]) -> dict[str, Any] | None:
    """`logprobs` of a chat's choice; None when they were not asked for."""
    if not tokens or tokens[0].logprob is None:
        return None

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        told = {"token": text_of(tokenizer, token), "logprob": logprob}
        return told | {"bytes": list(bytes_of(tokenizer, token))}

    content = [
        entry(c.token, c.logprob) | {"top_logprobs": [entry(token, value) for token, value in c.top]} for c in tokens
    ]
    return {"content": content, "refusal": None}


def of_completion(tokenizer: Any, tokens: Sequence[Chosen]) -> dict[str, Any]:
    """`logprobs` of a completion's choice without its prompt."""
    return CompletionLogprobs(tokenizer).of(tokens)


class CompletionLogprobs:
    """`logprobs` of one choice of a completion, also piece by piece. `before`: tokens that its text goes on from."""

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self._tokenizer, self._told = tokenizer, 0
        self._text = TextStream(tokenizer, before=before)

    def echo(self, prompt: Sequence[tuple[int, TokenScore | None]], added: int = 0) -> dict[str, Any]:
        """Log-probabilities of a prompt that stands before the answer; its first token has none. `added`: tokens at its
        beginning that the tokenizer put there, which are no part of the text."""
        read, found = TextStream(self._tokenizer, keeps_special=True), _nothing()
        for number, (token, score) in enumerate(prompt):
            text = self._tokenizer.decode([token]) if number <= added else piece_of(self._tokenizer, token)
            _add(self._tokenizer, found, text, read.length, token, score)
            read.add([token] if number >= added else [])
        self._told = read.length + len(read.finish())
        return found

    def of(self, tokens: Sequence[Chosen]) -> dict[str, Any]:
        """Log-probabilities of tokens behind all that came before. A token's place is that of its letter."""
        found = _nothing()
        for chosen in tokens:
            text = piece_of(self._tokenizer, chosen.token)
            _add(self._tokenizer, found, text, self._told + self._text.length, chosen.token, chosen)
            self._text.add([chosen.token])
        return found


def _nothing() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _add(
    tokenizer: Any, found: dict[str, Any], text: str, offset: int, token: int, score: TokenScore | Chosen | None
) -> None:
    found["tokens"].append(text)
    found["text_offset"].append(offset)
    found["token_logprobs"].append(None if score is None else score.logprob)
    top = None if score is None or score.logprob is None else _by_text(tokenizer, (*score.top, (token, score.logprob)))
    found["top_logprobs"].append(top)


def piece_of(tokenizer: Any, token: int) -> str:
    """One token as text, or, where it is only a piece of a letter, its bytes in words, as OpenAI writes them: such
    pieces would all read alike."""
    text = text_of(tokenizer, token)
    if UNFINISHED not in text or (found := bytes_of(tokenizer, token)) == text.encode():
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def _by_text(tokenizer: Any, top: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Likeliest first, the token itself last unless it is among them; of tokens that read alike the likelier stays."""
    found: dict[str, float] = {}
    for token, value in top:
        found.setdefault(piece_of(tokenizer, token), value)
    return found
