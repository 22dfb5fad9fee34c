"""Conversations to tokens, with the tokens that the assistant wrote marked: only they carry loss.

The template tells which characters those are: by its own {% generation %} marks, or by the marks that template.py gives
it. The whole text is tokenised once; a token carries loss from the one that holds a span's first character to the one
that holds its last, as in transformers. What cannot be marked is an error: a guessed mask would train on the user's
words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outcore.data.chat.notices import REASONING_KEYS
from outcore.data.chat.template import ChatTemplate
from outcore.data.rows import ChatExample, says_something
from outcore.data.sources import RowError, half_a_pair, is_sound

ADDED_END = "the chat template writes no end of the last turn: {token!r} is added, and trained"
SEQ2SEQ_REASONING = "reasoning of the last answer is not trained: an encoder-decoder learns an answer's words alone"
EMPTY_ANSWER = "answers without words, reasoning and tool calls are not trained"


@dataclass(frozen=True)
class Encoded:
    """A conversation's tokens."""

    ids: np.ndarray
    """uint32 [n]"""
    has_loss: np.ndarray
    """bool [n]"""
    notices: tuple[str, ...] = ()
    """Notices of what the template does not write, for counting."""


@dataclass
class ChatEncoder:
    """Turns conversations into tokens with a loss mask."""

    tokenizer: Any
    train_on_all: bool = False
    """True: loss on every token."""
    last_turn_only: bool = False
    """True: loss on the last assistant turn only."""
    _templates: dict[str, ChatTemplate] = field(default_factory=dict)

    def encode(self, example: ChatExample) -> Encoded:
        """One conversation. Raises RowError when the template refuses or leaves out a part of it, TemplateError when
        it cannot be told what the assistant wrote."""
        encoded = self.encode_many([example])[0]
        if isinstance(encoded, RowError):
            raise encoded
        return encoded

    def encode_many(self, examples: Sequence[ChatExample]) -> list[Encoded | RowError]:
        """Several conversations, tokenised in one call. Raises TemplateError."""
        written = [self._write(example) for example in examples]
        good = [one for one in written if isinstance(one, _Written)]
        encoded = iter(self._tokenised(good))
        return [next(encoded) if isinstance(one, _Written) else one for one in written]

    def _write(self, example: ChatExample) -> _Written | RowError:
        """The conversation's text and the spans in it that are trained."""
        try:
            template = self.template(example)
            if self.train_on_all:
                text = _sound(template.render(example))
                return _Written(text, [(0, len(text))], ())
            marked = template.mark(example)
            wanted = self._wanted(example)
            trained = [i for i in wanted if says_something(example.messages[i])]
            spans = sorted(span for i in trained for span in marked.spans[i])
            text, notices = _sound(marked.text), (*marked.notices, *[EMPTY_ANSWER] * (len(trained) < len(wanted)))
            if end := template.missing_end(example, marked):
                if len(example.messages) - 1 in trained:
                    spans.append((len(text), len(text) + len(end)))
                text, notices = text + end, (*notices, ADDED_END.format(token=end))
        except RowError as error:
            return error
        return _Written(text, spans, notices)

    def template(self, example: ChatExample) -> ChatTemplate:
        """The template for this conversation (tokenizers may have another one for tools), checked at first use."""
        source = self.tokenizer.get_chat_template(tools=example.tools)
        if source not in self._templates:
            template = ChatTemplate(self.tokenizer, source)
            if not self.train_on_all:
                template.check()
            self._templates[source] = template
        return self._templates[source]

    def describe(self) -> list[str]:
        """A sentence for every template that was used; for the default one when none was yet."""
        if not self._templates:
            self.template(ChatExample([]))
        return [] if self.train_on_all else [template.describe() for template in self._templates.values()]

    def split_last_turn(self, example: ChatExample) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
        """For encoder-decoder models: (ids before the last assistant turn, ids of its words, what is not written)."""
        last = max(i for i, message in enumerate(example.messages) if message["role"] == "assistant")
        if last in example.untrained:
            raise RowError(f"message {last + 1}, the last answer, is not to be trained")
        answer = example.messages[last]
        if answer.get("tool_calls"):
            raise RowError(
                f"message {last + 1}, the last answer, calls tools, and an encoder-decoder is trained on an answer's "
                "words alone. Take a decoder-only model for it, or leave such rows out with --on_bad_row skip"
            )
        if not answer["content"].strip():
            raise RowError(f"message {last + 1}, the last answer, has no words: nothing to learn from")
        asked = ChatExample(example.messages[:last], example.tools, variables=example.variables)
        template = self.template(example)
        notices = () if self.train_on_all or not asked.messages else tuple(template.mark(asked).notices)
        if any(answer.get(key) for key in REASONING_KEYS):
            notices += (SEQ2SEQ_REASONING,)
        prompt = template.render(asked, generation_prompt=True)
        return self._tokenise(prompt), self._tokenise(answer["content"]), notices

    def _wanted(self, example: ChatExample) -> list[int]:
        """The assistant messages that carry loss unless they are empty."""
        spoken = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
        chosen = spoken[-1:] if self.last_turn_only else spoken
        return [i for i in chosen if i not in example.untrained]

    def _tokenise(self, text: str) -> np.ndarray:
        ids = self.tokenizer(_sound(text), add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.uint32)

    def _tokenised(self, written: Sequence[_Written]) -> list[Encoded]:
        if not written:
            return []
        if not self.tokenizer.is_fast:
            return [Encoded(*self._in_pieces(one.text, one.spans), one.notices) for one in written]
        texts = [one.text for one in written]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        found = []
        for number, one in enumerate(written):
            ids = np.asarray(encoded["input_ids"][number], dtype=np.uint32)
            has_loss = np.ones(len(ids), dtype=bool) if self.train_on_all else _by_spans(encoded, number, one.spans)
            found.append(Encoded(ids, has_loss, one.notices))
        return found

    def _in_pieces(self, text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Tokenizers without offsets: piece by piece, each wholly inside or outside an assistant turn."""
        ids, mask, position = [], [], 0
        for start, end in [*spans, (len(text), len(text))]:
            for piece, is_assistant in ((text[position:start], False), (text[start:end], True)):
                if piece:
                    tokens = self._tokenise(piece)
                    ids.append(tokens)
                    mask.append(np.full(len(tokens), is_assistant))
            position = end
        return np.concatenate(ids), np.concatenate(mask)


@dataclass(frozen=True)
class _Written:
    """A conversation's text, its trained characters, and what is to be counted."""

    text: str
    spans: list[tuple[int, int]]
    notices: tuple[str, ...]


def _by_spans(encoded: Any, number: int, spans: list[tuple[int, int]]) -> np.ndarray:
    """Which tokens of text `number` of a batch carry loss: bool [n]."""
    has_loss = np.zeros(len(encoded["input_ids"][number]), dtype=bool)

    def token_of(characters: Iterable[int]) -> int | None:
        # A character may belong to no token (dropped white space): the nearest one inside the span that does.
        return next((t for c in characters if (t := encoded.char_to_token(number, c)) is not None), None)

    for start, end in spans:
        first, last = token_of(range(start, end)), token_of(range(end - 1, start - 1, -1))
        if first is None or last is None:
            continue
        while last + 1 < len(has_loss) and encoded.token_to_chars(number, last + 1) == encoded.token_to_chars(
            number, last
        ):
            last += 1  # further bytes of the same character
        has_loss[first : last + 1] = True
    return has_loss


def _sound(text: str) -> str:
    """The text itself. Raises RowError for half of a surrogate pair, which no tokenizer can take."""
    if not is_sound(text):
        raise RowError(half_a_pair(text))
    return text
