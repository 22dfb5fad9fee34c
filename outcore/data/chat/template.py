"""One chat template of one tokenizer: a conversation's text, and the characters in it that the assistant wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outcore.data.basis import TemplateError, shorten
from outcore.data.chat import habits
from outcore.data.chat.habits import CALL, Habits, told, user
from outcore.data.chat.marks import CLOSE, OPEN, Rendering, marked_template
from outcore.data.rows import ChatExample
from outcore.data.sources import RowError

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_NO_WORDS = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class Marked:
    """A conversation's text and, for every assistant message, the characters that carry loss."""

    text: str
    spans: Mapping[int, list[tuple[int, int]]]
    notices: tuple[str, ...] = ()
    """What the template does not write, in words that are the same for every conversation, so that they can be
    counted."""


class ChatTemplate:
    """A template's source with what was learned about it. `check()` once before the first conversation."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        """Learns the template's habits. Raises TemplateError when the source is no template."""
        self.tokenizer, self.source = tokenizer, source
        self.is_marked = bool(_GENERATION_TAG.search(source))
        self._twin = marked_template(source)
        self._specials = special_tokens(tokenizer)
        self._parts = self._call_text = False
        # Templates of vision models read a list of parts only, some others join tool arguments as text.
        self._parts = not self._writes(habits.TOLD, told(habits.TOLD))
        self._parts = self._parts and self._writes(habits.TOLD, told(habits.TOLD))
        name, call = CALL["function"]["name"], told("", tool_calls=[CALL])
        self._call_text = not self._writes(name, call)
        self._call_text = self._call_text and self._writes(name, call)
        self.habits: Habits = habits.learn(self._try, self._specials, CALL)

    @property
    def name(self) -> str:
        """Whose template it is."""
        return f"the chat template of {getattr(self.tokenizer, 'name_or_path', '') or 'this tokenizer'}"

    def check(self) -> None:
        """TemplateError when a plain conversation of two turns cannot be marked."""
        talk = [user(habits.ASKED), told(habits.TOLD), user(habits.ASKED_AGAIN), told(habits.TOLD_AGAIN)]
        if self._try(talk) is None:
            return  # it takes no such conversation; the rows are checked one by one
        try:
            marked = self.mark(ChatExample(talk))
        except RowError as error:
            raise self._refused(str(error)) from error
        learned = "".join(marked.text[start:end] for spans in marked.spans.values() for start, end in spans)
        for words in (habits.TOLD, habits.TOLD_AGAIN):
            if words not in learned:
                raise self._refused(f"the answer {words!r} lies outside of what it marks")
        for words in (habits.ASKED, habits.ASKED_AGAIN):
            if words in learned:
                raise self._refused(f"the question {words!r} lies inside of what it marks")

    def _refused(self, why: str) -> TemplateError:
        return TemplateError(
            f"{self.name} does not let the assistant's tokens be told apart ({why}). Mark them in the template with "
            "{% generation %} ... {% endgeneration %}, set train_on_prompt: true to train on everything, or use "
            "another tokenizer's template"
        )

    def prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages in the form that this template reads: parts or text, tool arguments as objects or as JSON text."""
        return [self._prepared(message) for message in messages]

    def _prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        ready = {key: value for key, value in message.items() if value is not None}
        reasoning = next((ready[key] for key in ("reasoning_content", "thinking", "reasoning") if key in ready), None)
        if reasoning is not None:  # as transformers does: templates read one name or the other
            ready = {"thinking": reasoning, **ready, "reasoning_content": reasoning}
        if self._parts and isinstance(ready.get("content"), str):
            ready["content"] = [{"type": "text", "text": ready["content"]}]
        if calls := ready.get("tool_calls"):
            ready["tool_calls"] = [_with_arguments(call, as_text=self._call_text) for call in calls]
        return ready

    def variables(self, example: ChatExample) -> dict[str, Any]:
        """What the template may read beside the messages."""
        fixed = {"tools": example.tools, "documents": None, "add_generation_prompt": False}
        return {**self.tokenizer.special_tokens_map, **fixed, **example.variables}

    def render(self, example: ChatExample, *, generation_prompt: bool = False) -> str:
        """The text that transformers' own `apply_chat_template` gives."""
        try:
            text = self.tokenizer.apply_chat_template(
                self.prepared(example.messages),
                tools=example.tools,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **example.variables,
            )
        except Exception as error:  # jinja2's TemplateError and whatever the template's own code raises
            raise RowError(f"the tokenizer's chat template refuses this conversation: {shorten(str(error))}") from error
        return str(text)

    def _writes(self, words: str, message: dict[str, Any]) -> bool:
        rendering = self._try([user(habits.ASKED), message])
        return rendering is not None and words in rendering.text

    def _try(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = False) -> Rendering | None:
        variables = {**self.variables(ChatExample([])), "add_generation_prompt": generation_prompt}
        try:
            return self._twin.render(self.prepared(messages), variables)
        except Exception:  # the template refuses such a conversation, by whatever error its own code raises
            return None

    def mark(self, example: ChatExample) -> Marked:
        """Text and spans of one conversation. Raises RowError when the template refuses it or cannot be marked."""
        text = self.render(example)
        if OPEN in text or CLOSE in text:
            raise RowError(f"the conversation contains the private character U+{ord(OPEN):X} or U+{ord(CLOSE):X}")
        try:
            rendering = self._twin.render(self.prepared(example.messages), self.variables(example))
        except Exception as error:
            raise RowError(f"the chat template's marked twin fails: {shorten(str(error))}") from error
        if rendering.text != text:
            raise RowError("marks in the chat template change what it writes: what the assistant wrote is not known")
        spans = self._tagged(example, rendering) if self.is_marked else self._spans(example, rendering)
        return Marked(text, spans, tuple(self._notices(example, rendering)))

    def _tagged(self, example: ChatExample, rendering: Rendering) -> dict[int, list[tuple[int, int]]]:
        """The spans of a template's own {% generation %} marks, each with the message that wrote it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {key: value for key, value in self.variables(example).items() if key != "tools"}
        _, tagged = render_jinja_template(
            conversations=[self.prepared(example.messages)],
            tools=example.tools,
            chat_template=self.source,
            return_assistant_tokens_mask=True,
            **variables,
        )
        found: dict[int, list[tuple[int, int]]] = {i: [] for i in _assistants(example.messages)}
        order = list(found)
        pairs = [(int(start), int(end)) for start, end in tagged[0]]
        for number, (start, end) in enumerate(pairs):
            owner = next((p.message for p in rendering.pieces if p.start <= start < p.end), None)
            if owner not in found and len(pairs) == len(order):
                owner = order[number]
            if owner not in found:  # e.g. the end of text behind the last turn
                owner = order[-1]
            if end > start:
                found[owner].append((start, end))
        if not any(found.values()) and any(_is_spoken(example.messages[i]) for i in found):
            raise TemplateError(
                f"{self.name} has {{% generation %}} marks, but they cover no token of a conversation that has "
                "assistant text. Correct the template (the mark must enclose the assistant's content)"
            )
        return found

    def _spans(self, example: ChatExample, rendering: Rendering) -> dict[int, list[tuple[int, int]]]:
        messages, text = example.messages, rendering.text
        found: dict[int, list[tuple[int, int]]] = {}
        for i in _assistants(messages):
            pieces = rendering.of(i)
            if not pieces:
                if _is_spoken(messages[i]) or messages[i].get("tool_calls"):
                    raise RowError(f"the chat template writes nothing of message {i + 1} (assistant)")
                found[i] = []
                continue
            start = self._behind_header(text[pieces[0].start : pieces[0].end], messages, i) + pieces[0].start
            spans = [(start, pieces[0].end), *((piece.start, piece.end) for piece in pieces[1:])]
            found[i] = self._with_end(spans, rendering, messages, i)
        return found

    def _behind_header(self, written: str, messages: Sequence[Mapping[str, Any]], i: int) -> int:
        """Position in what a message wrote from which on the model writes by itself."""
        before = messages[i - 1]["role"] if i else None
        header = self.habits.header("system" if before == "developer" else before)
        if i == 0:  # BOS and a default system prompt may stand before it
            at = written.find(header)
            if at >= 0 and header:
                return at + len(header)
            bos = str(self.tokenizer.bos_token or "")
            if not header:
                return len(bos) if bos and written.startswith(bos) else 0
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
        self, spans: list[tuple[int, int]], rendering: Rendering, messages: Sequence[Mapping[str, Any]], i: int
    ) -> list[tuple[int, int]]:
        """The spans with the token that ends the turn, wherever the template writes it."""
        text, (start, end) = rendering.text, spans[-1]
        is_last = i == len(messages) - 1
        is_before_tail = is_last and rendering.pieces[-1].message is None and rendering.pieces[-1].start == end
        if is_before_tail and not self._without_specials(text[end:]).strip():
            return [*spans[:-1], (start, len(text))]  # e.g. the end-of-text token of Phi-3
        without_space = text[start:end].rstrip(" ")
        if without_space.endswith(tuple(self._specials)):  # a space behind the end of the turn says nothing
            end = start + len(without_space)
            spans = [*spans[:-1], (start, end)]
        opener = self.habits.openers.get("tool", "")
        if is_last and opener and messages[i].get("tool_calls") and text[:end].endswith(opener):
            return [*spans[:-1], (start, end - len(opener))]  # begins the tool's answer, written in advance
        if not self._ends(text[start:end]):
            following = next((token for token in self._specials if text.startswith(token, end)), "")
            if following and not is_last and messages[i + 1]["role"] != "assistant":
                return [*spans, (end, end + len(following))]  # the next message's first token ends this turn
        return spans

    def missing_end(self, example: ChatExample, marked: Marked) -> str:
        """The token to add where the last turn's end is not in the text, "" when it is."""
        last = len(example.messages) - 1
        if example.messages[last]["role"] != "assistant" or self.is_marked or not marked.spans.get(last):
            return ""
        start, end = marked.spans[last][-1]
        if self._ends(marked.text[start:end]) or end < len(marked.text):
            return ""
        role = "tool" if example.messages[last].get("tool_calls") else "user"
        return self.habits.openers.get(role, "") or str(self.tokenizer.eos_token or "")

    def _ends(self, written: str) -> bool:
        written = written.rstrip()
        return any(written.endswith(token) for token in self._specials)

    def _without_specials(self, text: str) -> str:
        for token in self._specials:
            text = text.replace(token, "")
        return text

    def _notices(self, example: ChatExample, rendering: Rendering) -> list[str]:
        """What of the conversation the template does not write. Raises RowError where that would train on a lie."""
        text, notices = rendering.text, []
        messages = example.messages
        last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for i, message in enumerate(messages):
            content, role = str(message["content"]), message["role"]
            thought = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
            if role == "assistant" and thought is None and (inside := _THINKING.search(content)):
                thought = inside[1]
            words = content.rpartition("</think>")[2] if role == "assistant" else content
            if not _is_written(words, text) and message.get("tool_calls"):
                notices.append("words beside a tool call are not written by the chat template")
            elif not _is_written(words, text):
                raise RowError(
                    f"the chat template leaves out what message {i + 1} ({role}) says: {shorten(words, 60)!r}"
                )
            for call in message.get("tool_calls") or ():
                name = str((call.get("function") or call).get("name"))
                if not any(name in text[piece.start : piece.end] for piece in rendering.of(i)):
                    raise RowError(f"the chat template does not write the tool call {name!r} of message {i + 1}")
            if thought and not _is_written(str(thought), text):
                which = "the last answer" if i > last_user else "earlier answers"
                notices.append(f"reasoning of {which} is not written by the chat template")
            unread = [k for k in message if k not in ("role", "content", *REASONING_KEYS) and k not in self.source]
            notices += [f"message key {key!r} is not read by the chat template" for key in unread]
        if example.tools and not any(_tool_name(tool) in text for tool in example.tools):
            notices.append("'tools' is not written by the chat template")
        unread = [key for key in example.variables if key not in self.source]
        notices += [f"chat_template_kwargs key {key!r} is not read by the chat template" for key in unread]
        return notices


def special_tokens(tokenizer: Any) -> list[str]:
    """Every token that the tokenizer knows as special, named or only added, longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {str(token) for token in tokenizer.all_special_tokens}
    found |= {token.content for token in added.values() if token.special}
    return sorted((token for token in found if token), key=len, reverse=True)


def _assistants(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _is_spoken(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(str(message["content"]).strip())


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _is_written(words: str, text: str) -> bool:
    """True when the words stand in the text, also as JSON or with other white space."""
    words = words.strip()
    if words in text or json.dumps(words, ensure_ascii=False)[1:-1] in text:
        return True
    return _NO_WORDS.sub("", words)[:400] in _NO_WORDS.sub("", text)


def _with_arguments(call: Any, *, as_text: bool) -> Any:
    """A tool call with its arguments as an object, or as JSON text for templates that only join texts."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _with_arguments(function, as_text=as_text)}
    arguments = call.get("arguments")
    if isinstance(arguments, str) and not as_text:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
        return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
    if as_text and arguments is not None and not isinstance(arguments, str):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return call
