"""Which characters of a rendered conversation carry loss: from behind each turn's header to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outcore.data.basis import shorten
from outcore.data.chat.habits import Habits
from outcore.data.chat.marks import Rendering
from outcore.data.sources import RowError

Messages = Sequence[Mapping[str, Any]]
Spans = dict[int, list[tuple[int, int]]]
"""Message number -> its (start, end) characters, in order."""


@dataclass(frozen=True)
class SpanFinder:
    """Finds spans under one template and tokenizer."""

    habits: Habits
    specials: list[str]
    """The tokenizer's special tokens, longest first."""
    bos: str
    eos: str

    def of(self, messages: Messages, rendering: Rendering) -> Spans:
        """Message number -> the characters that carry loss. Raises RowError where that is not known."""
        text = rendering.text
        found: Spans = {}
        for i in assistants(messages):
            pieces = rendering.of(i)
            if not pieces:
                if is_spoken(messages[i]) or messages[i].get("tool_calls"):
                    raise RowError(f"the chat template writes nothing of message {i + 1} (assistant)")
                found[i] = []
                continue
            start = self._behind_header(text[pieces[0].start : pieces[0].end], messages, i) + pieces[0].start
            spans = [(start, pieces[0].end), *((piece.start, piece.end) for piece in pieces[1:])]
            found[i] = self._with_end(spans, rendering, messages, i)
        return found

    def _behind_header(self, written: str, messages: Messages, i: int) -> int:
        """Position in what a message wrote from which on the model writes by itself."""
        before = messages[i - 1]["role"] if i else None
        header = self.habits.header("system" if before == "developer" else before)
        if i == 0:  # BOS and a default system prompt may stand before it
            at = written.find(header)
            if at >= 0 and header:
                return at + len(header)
            if not header:
                return len(self.bos) if self.bos and written.startswith(self.bos) else 0
        for known in (header, *sorted(set(self.habits.headers.values()), key=len, reverse=True)):
            if known and written.startswith(known):
                return len(known)
        if not header:
            return 0
        at = written.find(header)
        if at < 0:
            raise RowError(
                f"the chat template begins message {i + 1} (assistant) with {shorten(written[:60])!r} instead of "
                f"{header!r}: what the assistant wrote is not known"
            )
        return at + len(header)

    def _with_end(
        self, spans: list[tuple[int, int]], rendering: Rendering, messages: Messages, i: int
    ) -> list[tuple[int, int]]:
        """The spans with the token that ends the turn, wherever the template writes it."""
        text, (start, end) = rendering.text, spans[-1]
        is_last = i == len(messages) - 1
        is_before_tail = is_last and rendering.pieces[-1].message is None and rendering.pieces[-1].start == end
        if is_before_tail and not self._without_specials(text[end:]).strip():
            return [*spans[:-1], (start, len(text))]  # e.g. the end-of-text token of Phi-3
        without_space = text[start:end].rstrip(" ")
        if without_space.endswith(tuple(self.specials)):  # a space behind the end of the turn says nothing
            end = start + len(without_space)
            spans = [*spans[:-1], (start, end)]
        opener = self.habits.openers.get("tool", "")
        if is_last and opener and messages[i].get("tool_calls") and text[:end].endswith(opener):
            return [*spans[:-1], (start, end - len(opener))]  # begins the tool's answer, written in advance
        if not self._ends(text[start:end]):
            following = next((token for token in self.specials if text.startswith(token, end)), "")
            if following and not is_last and messages[i + 1]["role"] != "assistant":
                return [*spans, (end, end + len(following))]  # the next message's first token ends this turn
        return spans

    def missing_end(self, messages: Messages, text: str, spans: Spans) -> str:
        """The token to add where the last turn's end is not in the text, "" when it is."""
        last = len(messages) - 1
        if messages[last]["role"] != "assistant" or not spans.get(last):
            return ""
        start, end = spans[last][-1]
        if self._ends(text[start:end]) or end < len(text):
            return ""
        if self.habits.end:  # Qwen1.5 ends every turn but the last
            return self.habits.end
        role = "tool" if messages[last].get("tool_calls") else "user"
        return self.habits.openers.get(role, "") or self.eos

    def _ends(self, written: str) -> bool:
        written = written.rstrip()
        return any(written.endswith(token) for token in self.specials)

    def _without_specials(self, text: str) -> str:
        for token in self.specials:
            text = text.replace(token, "")
        return text


def assistants(messages: Messages) -> list[int]:
    """Numbers of the assistant's messages."""
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def is_spoken(message: Mapping[str, Any]) -> bool:
    """True for an answer that says something."""
    return message["role"] == "assistant" and bool(str(message["content"]).strip())
