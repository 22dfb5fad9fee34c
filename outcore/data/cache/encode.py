"""Examples to documents of tokens. A token is a uint32 whose top bit says "no loss" (vocabularies stay below 2**31).

Text is cut into pieces of at most 256 Ki characters before tokenising, preferably behind a line break that is followed
by a visible character, where the usual pre-tokenizers cut anyway; pieces are tokenised in parallel by fast tokenizers
and a large file never sits in RAM. A document ends with EOS, and begins with BOS where the tokenizer adds one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from outcore.data.basis import DataError
from outcore.data.chat import ChatEncoder
from outcore.data.rows import ChatExample, Example, TextExample, TokensExample
from outcore.data.sources import RowError, half_a_pair, is_sound

NO_LOSS = np.uint32(1 << 31)
TOKEN = np.uint32(NO_LOSS - np.uint32(1))
"""Mask of the bits that are the token's id."""
PIECE_CHARS = 256 * 1024


def token_ids(tokens: np.ndarray) -> np.ndarray:
    """uint32 with loss bits -> int64 ids."""
    return (tokens & TOKEN).astype(np.int64)


def carries_loss(tokens: np.ndarray) -> np.ndarray:
    """uint32 with loss bits -> bool, True where the token is a target."""
    return (tokens & NO_LOSS) == 0


def cut_text(text: str, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Pieces of at most `piece_chars` whose concatenation is the text."""
    start = 0
    while len(text) - start > piece_chars:
        end = _cut_position(text, start, start + piece_chars)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _cut_position(text: str, start: int, limit: int) -> int:
    floor = start + (limit - start) // 2
    position = text.rfind("\n", floor, limit)
    while position != -1:
        if position + 1 < len(text) and not text[position + 1].isspace():
            return position + 1
        position = text.rfind("\n", floor, position)
    for separator in ("\n", " "):
        if (position := text.rfind(separator, floor, limit)) != -1:
            return position + (separator == "\n")  # a space belongs to the word behind it
    return limit


@dataclass(frozen=True)
class DocumentEncoder:
    """Encodes whole examples; large text documents go piece by piece through `encode_pieces` and `edges`."""

    tokenizer: Any
    train_on_prompt: bool = False
    encoder_decoder: bool = False
    last_turn_only: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Only the settings travel to another process; what was learned about the template is learned again there."""
        return DocumentEncoder, (self.tokenizer, self.train_on_prompt, self.encoder_decoder, self.last_turn_only)

    @cached_property
    def chat(self) -> ChatEncoder:
        """Encoder of conversations."""
        return ChatEncoder(self.tokenizer, self.train_on_prompt, self.last_turn_only)

    def end_token_id(self) -> int:
        """EOS, or SEP for tokenizers that only have that; DataError when there is neither."""
        for token_id in (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id):
            if token_id is not None:
                return int(token_id)
        raise DataError(
            "the tokenizer has no end-of-text token (eos_token), so documents cannot be told apart. Set one, e.g. "
            "tokenizer.eos_token = '</s>', and save the tokenizer again"
        )

    def begin_token_id(self) -> int | None:
        """BOS where the tokenizer puts one before text by itself, else None."""
        begin = self.tokenizer.bos_token_id
        if begin is None:
            return None
        probe = self.tokenizer("a", verbose=False)["input_ids"]
        return int(begin) if len(probe) and probe[0] == begin else None

    @cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens before a text document, tokens after it)."""
        begin = self.begin_token_id()
        before = np.asarray([] if begin is None else [begin], dtype=np.uint32)
        return before, np.asarray([self.end_token_id()], dtype=np.uint32)

    @cached_property
    def _ends(self) -> dict[bool, frozenset[int]]:
        """Tokens that may end what is trained: of a conversation every added token, of other rows special ones."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {*self.tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        return {False: frozenset(special), True: frozenset({*special, *added})}

    def answer_end(self, tokens: np.ndarray, is_chat: bool) -> tuple[int, bool] | None:
        """The token by which a document's last trained words end, and whether it ends the document as well; None where
        an ordinary piece does. White space behind it does not count."""
        for position in reversed(np.flatnonzero(carries_loss(tokens)).tolist()):
            token = int(tokens[position])
            if token in self._ends[is_chat] and self._says([token]):
                return token, not self._says(token_ids(tokens[position + 1 :]).tolist())
            if self._says([token]):
                return None
        return None

    def _says(self, ids: list[int]) -> bool:
        return bool(ids) and bool(str(self.tokenizer.decode(ids, skip_special_tokens=False)).strip())

    def encode_pieces(self, pieces: list[str]) -> list[np.ndarray]:
        """Token ids of each piece, without special tokens; one call, parallel inside for fast tokenizers."""
        if not pieces:
            return []
        encoded = self.tokenizer(
            pieces, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]
        return [_checked(ids) for ids in encoded]

    def encode_text(self, text: str) -> np.ndarray:
        """One document's tokens, between BOS and EOS."""
        return self.between_edges(np.concatenate([*self.encode_pieces(list(cut_text(text))), np.empty(0, np.uint32)]))

    def between_edges(self, ids: np.ndarray) -> np.ndarray:
        """The tokens with BOS before and EOS behind them, where the text does not have them already."""
        before, after = self.edges
        parts = [ids]
        if len(before) and not (len(ids) and ids[0] == before[0]):
            parts.insert(0, before)
        if not (len(ids) and ids[-1] == after[0]):
            parts.append(after)
        return np.concatenate(parts)

    def encode(self, example: Example, notices: Counter[str] | None = None) -> np.ndarray:
        """One document's tokens with loss bits; encoder-decoder: source tokens (no loss), then target tokens (loss).

        `notices` counts what of a conversation the chat template does not write. Raises RowError."""
        encoded = self.encode_many([example], notices)[0]
        if isinstance(encoded, RowError):
            raise encoded
        return encoded

    def encode_many(
        self, examples: Sequence[Example], notices: Counter[str] | None = None
    ) -> list[np.ndarray | RowError]:
        """Several documents, each kind in one call of the tokenizer, which is parallel inside for fast tokenizers."""
        encoded: dict[int, np.ndarray | RowError] = {}
        chats = [i for i, example in enumerate(examples) if isinstance(example, ChatExample)]
        pairs: list[int] = []
        pieces: list[str] = []
        for i, example in enumerate(examples):
            if isinstance(example, TokensExample):
                ids = _checked(example.ids)
                encoded[i] = np.where(np.asarray(example.has_loss, dtype=bool), ids, ids | NO_LOSS).astype(np.uint32)
            elif isinstance(example, TextExample):
                if broken := next(
                    (text for text in (example.prompt, example.text) if text and not is_sound(text)), None
                ):
                    encoded[i] = RowError(half_a_pair(broken))
                elif example.prompt is None:
                    encoded[i] = self.encode_text(example.text)
                else:
                    pairs.append(i)
                    pieces += [example.prompt, example.text]
        ids_of = iter(self.encode_pieces(pieces))
        encoded |= {i: self._pair(next(ids_of), next(ids_of)) for i in pairs}
        encoded |= zip(chats, self._chats([examples[i] for i in chats], notices), strict=True)
        return [encoded[i] for i in range(len(examples))]

    def _pair(self, prompt: np.ndarray, completion: np.ndarray) -> np.ndarray:
        if self.encoder_decoder:
            return np.concatenate([self._ended(prompt) | NO_LOSS, self._ended(completion)])
        whole = self.between_edges(np.concatenate([prompt, completion]))
        before = self.edges[0]
        begin = len(before) if len(before) and not (len(prompt) and prompt[0] == before[0]) else 0
        if not self.train_on_prompt:
            whole[: begin + len(prompt)] |= NO_LOSS
        return whole

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        after = self.edges[1]
        return ids if len(ids) and ids[-1] == after[0] else np.concatenate([ids, after])

    def _chats(self, examples: Sequence[Any], notices: Counter[str] | None) -> list[np.ndarray | RowError]:
        if self.encoder_decoder:
            return [self._source_and_target(example, notices) for example in examples]
        found: list[np.ndarray | RowError] = []
        for encoded in self.chat.encode_many(examples):
            if isinstance(encoded, RowError):
                found.append(encoded)
                continue
            if notices is not None:
                notices.update(encoded.notices)
            ids = _checked(encoded.ids)
            found.append(np.where(encoded.has_loss, ids, ids | NO_LOSS).astype(np.uint32))
        return found

    def _source_and_target(self, example: ChatExample, notices: Counter[str] | None) -> np.ndarray | RowError:
        try:
            source, target, said = self.chat.split_last_turn(example)
        except RowError as error:
            return error
        if notices is not None:
            notices.update(said)
        return np.concatenate([self._ended(_checked(source)) | NO_LOSS, self._ended(_checked(target))])


def _checked(ids: Any) -> np.ndarray:
    tokens = np.asarray(ids, dtype=np.int64)
    if len(tokens) and int(tokens.max()) >= int(NO_LOSS):
        raise DataError(f"the tokenizer gave token id {int(tokens.max())}; ids from 2**31 on are not supported")
    return tokens.astype(np.uint32)
