"""Log-probabilities of an answer's tokens in OpenAI's shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from outcore.infer.passes import TokenScore
from outcore.infer.requests import Chosen

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoding gives for bytes that are no whole letter."""
_SEEN = (*range(33, 127), *range(161, 173), *range(174, 256))
_UNSEEN = tuple(byte for byte in range(256) if byte not in _SEEN)
BYTE_LETTERS = MappingProxyType({chr(b): b for b in _SEEN} | {chr(256 + n): b for n, b in enumerate(_UNSEEN)})
"""Letter of a byte-level vocabulary -> its byte, as GPT-2 writes them: those that cannot be seen from 256 on."""
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a blank in its pieces."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece writes a byte that is in no piece of its vocabulary."""


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


def of_completion(
    tokenizer: Any,
    tokens: Sequence[Chosen],
    prompt: Sequence[tuple[int, TokenScore | None]] = (),
    offset: int = 0,
) -> dict[str, Any]:
    """`logprobs` of a completion's choice. `prompt`: tokens that are echoed before it, with their scores (the first
    has none); `offset`: letters of the choice that were told before, by this function."""
    texts, values, tops, offsets = [], [], [], []

    def add(token: int, logprob: float | None, top: Sequence[tuple[int, float]] | None) -> None:
        nonlocal offset
        text = text_of(tokenizer, token) if offsets or not prompt else tokenizer.decode([token])
        texts.append(text)
        values.append(logprob)
        tops.append(None if top is None else _by_text(tokenizer, top))
        offsets.append(offset)
        offset += len(text)

    for token, score in prompt:
        add(token, None if score is None else score.logprob, None if score is None else score.top)
    for chosen in tokens:
        add(chosen.token, chosen.logprob, chosen.top)
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _by_text(tokenizer: Any, top: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Likeliest first; of tokens that read alike the likelier stays."""
    found: dict[str, float] = {}
    for token, value in top:
        found.setdefault(text_of(tokenizer, token), value)
    return found
