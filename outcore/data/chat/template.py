"""One chat template of one tokenizer: a conversation's text, and the characters in it that the assistant wrote.

The form in which a chat template reads messages: text or parts, tool arguments as objects or as JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outcore.data.basis import TemplateError, shorten
from outcore.data.chat import habits
from outcore.data.chat.habits import (
    ASKED,
    ASKED_AGAIN,
    CALL,
    NUMBERED_CALL,
    THOUGHT,
    TOLD,
    TOLD_AGAIN,
    result_of,
    told,
    user,
)
from outcore.data.chat.marks import CLOSE, OPEN, Rendering, marked_template
from outcore.data.chat.notices import check_calls, notices_of
from outcore.data.chat.spans import SpanFinder, Spans, assistants, is_spoken
from outcore.data.rows import REASONING_KEYS, ChatExample
from outcore.data.sources import RowError


@dataclass(frozen=True)
class Form:
    """Form in which one template wants its messages."""

    parts: bool = False
    """True: content as a list of parts, as templates of vision models read it."""
    calls_as_text: bool = False
    """True: tool arguments as JSON text, for templates that only join texts."""
    knows_developer: bool = False
    """False: a developer's message is the system's, which OpenAI's clients mean by it."""

    def prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages in this form."""
        return [self._prepared(message) for message in messages]

    def _prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        ready = {key: value for key, value in message.items() if value is not None}
        if ready.get("role") == "developer" and not self.knows_developer:
            ready["role"] = "system"
        reasoning = next((ready[key] for key in REASONING_KEYS if key in ready), None)
        if reasoning is not None:  # as transformers does: templates read one name or the other
            ready = {"thinking": reasoning, **ready, "reasoning_content": reasoning}
        if self.parts and isinstance(ready.get("content"), str):
            ready["content"] = [{"type": "text", "text": ready["content"]}]
        if calls := ready.get("tool_calls"):
            ready["tool_calls"] = [_with_arguments(call, as_text=self.calls_as_text) for call in calls]
        return ready


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
        except (ValueError, RecursionError):
            return call
        return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
    if as_text and arguments is not None and not isinstance(arguments, str):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return call


_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Marked:
    """A conversation's text and, for every assistant message, the characters that carry loss."""

    text: str
    spans: Spans
    notices: tuple[str, ...] = ()
    """Notices of what the template does not write, the same for every conversation, so that they can be counted."""


class ChatTemplate:
    """A template's source with what was learned about it. `check()` once before the first conversation."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        """Learns the template's habits. Raises TemplateError when the source is no template."""
        self.tokenizer, self.source = tokenizer, source
        self.is_marked = bool(_GENERATION_TAG.search(source))
        self._twin = marked_template(source)
        self._words = frozenset(re.findall(r"\w+", source))
        self._form = Form()
        self._form = next((form for form in (Form(), Form(parts=True)) if self._writes(TOLD, told(TOLD), form)), Form())
        self._call = self._choose_call()
        self._form = replace(self._form, knows_developer="developer" in self._words)
        specials = special_tokens(tokenizer)
        learned = habits.learn(self._try, specials, self._call)
        self.finder = SpanFinder(learned, specials, str(tokenizer.bos_token or ""), str(tokenizer.eos_token or ""))

    def _choose_call(self) -> dict[str, Any]:
        """A tool call that the template writes; its form of arguments is kept."""
        plain = self._form
        for call in (CALL, NUMBERED_CALL):
            for as_text in (False, True):
                form = replace(plain, calls_as_text=as_text)
                if self._writes(call["function"]["name"], told("", tool_calls=[call]), form):
                    return call
        self._form = plain
        return CALL

    @property
    def name(self) -> str:
        """Whose template it is."""
        return f"the chat template of {getattr(self.tokenizer, 'name_or_path', '') or 'this tokenizer'}"

    def check(self) -> None:
        """TemplateError when a plain conversation of two turns cannot be marked."""
        talk = [user(ASKED), told(TOLD), user(ASKED_AGAIN), told(TOLD_AGAIN)]
        if self._try(talk) is None:
            return  # it takes no such conversation; the rows are checked one by one
        try:
            marked = self.mark(ChatExample(talk))
        except RowError as error:
            raise self._refused(str(error)) from error
        if self.is_marked:
            return  # what the template's author marked is taken as it is
        if self.finder.habits.prompt.strip() and not self.finder.habits.header("user"):
            prompt = self.finder.habits.prompt
            raise self._refused(f"an answer begins otherwise than the generation prompt {prompt!r}")
        learned = "".join(marked.text[start:end] for spans in marked.spans.values() for start, end in spans)
        for words in (TOLD, TOLD_AGAIN):
            if words not in learned:
                raise self._refused(f"the answer {words!r} lies outside of what it marks")
        for words in (ASKED, ASKED_AGAIN):
            if words in learned:
                raise self._refused(f"the question {words!r} lies inside of what it marks")

    def describe(self) -> str:
        """Tell people how a turn begins and ends, and what the template cannot take. The text is kept with the tokens,
        which other models with this template use too, so it names none."""
        if self.is_marked:
            how = "it marks what the assistant writes itself ({% generation %})"
        else:
            header, end = self.finder.habits.header("user"), self.finder.habits.end
            how = f"a turn begins with {header!r} (no loss), then all bears loss"
            how += f" up to its end {end!r}" if end else "; it writes no end of a turn"
        cannot = [name for name, talk in self._unusual().items() if not self._can_mark(talk)]
        how += "; it writes the date of the day on which the data is tokenised" if "strftime_now" in self._words else ""
        return f"the chat template: {how}" + (f"; it cannot take {', '.join(cannot)}" if cannot else "")

    def _unusual(self) -> dict[str, list[dict[str, Any]]]:
        asked = user(ASKED)
        return {
            "a system message": [{"role": "system", "content": "Be brief."}, asked, told(TOLD)],
            "tool calls": [asked, told("", tool_calls=[self._call]), result_of(self._call), told(TOLD)],
            "reasoning": [asked, told(TOLD, reasoning_content=THOUGHT)],
            "an empty answer": [asked, told(""), user(ASKED_AGAIN), told(TOLD)],
            "an answer first": [told(TOLD), asked, told(TOLD_AGAIN)],
            "two answers in a row": [asked, told(TOLD), told(TOLD_AGAIN)],
        }

    def _can_mark(self, talk: list[dict[str, Any]]) -> bool:
        try:
            return not any("reasoning" in notice for notice in self.mark(ChatExample(talk)).notices)
        except RowError:
            return False

    def _refused(self, why: str) -> TemplateError:
        return TemplateError(
            f"{self.name} does not let the assistant's tokens be told apart ({why}). Mark them in the template with "
            "{% generation %} ... {% endgeneration %}, set train_on_prompt: true to train on everything, or use "
            "another tokenizer's template"
        )

    def variables(self, example: ChatExample) -> dict[str, Any]:
        """Collect the variables that the template may read beside the messages."""
        fixed = {"tools": example.tools, "documents": None, "add_generation_prompt": False}
        return {**self.tokenizer.special_tokens_map, **fixed, **example.variables}

    def prompt(self, example: ChatExample, *, goes_on: bool = False) -> str:
        """The text up to where an answer begins, or, where it `goes_on`, to the end of what the last message says.
        Raises RowError as `mark` does, also for a tool call that the template does not write."""
        text = self.render(example, generation_prompt=not goes_on, goes_on=goes_on)
        if any(message.get("tool_calls") for message in example.messages):
            variables = {**self.variables(example), "add_generation_prompt": not goes_on}
            check_calls(example, self._twin.render(self._form.prepared(example.messages), variables))
        return text

    def render(self, example: ChatExample, *, generation_prompt: bool = False, goes_on: bool = False) -> str:
        """The text that transformers' own `apply_chat_template` gives."""
        try:
            text = self.tokenizer.apply_chat_template(
                self._form.prepared(example.messages),
                tools=example.tools,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                continue_final_message=goes_on,
                **example.variables,
            )
        except Exception as error:  # jinja2's TemplateError and whatever the template's own code raises
            why = shorten(str(error) or type(error).__name__)
            raise RowError(f"the tokenizer's chat template refuses this conversation: {why}") from error
        return str(text)

    def _writes(self, words: str, message: dict[str, Any], form: Form) -> bool:
        self._form = form
        rendering = self._try([user(ASKED), message])
        return rendering is not None and words in rendering.text

    def _try(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = False) -> Rendering | None:
        variables = {**self.variables(ChatExample([])), "add_generation_prompt": generation_prompt}
        try:
            return self._twin.render(self._form.prepared(messages), variables)
        except Exception:  # the template refuses such a conversation, by whatever error its own code raises
            return None

    def missing_end(self, example: ChatExample, marked: Marked) -> str:
        """The token to add where the last turn's end is not in the text, "" when it is."""
        return "" if self.is_marked else self.finder.missing_end(example.messages, marked.text, marked.spans)

    def mark(self, example: ChatExample) -> Marked:
        """Text and spans of one conversation. Raises RowError when the template refuses it or cannot be marked."""
        text = self.render(example)
        if OPEN in text or CLOSE in text:
            raise RowError(f"the conversation contains the private character U+{ord(OPEN):X} or U+{ord(CLOSE):X}")
        try:
            rendering = self._twin.render(self._form.prepared(example.messages), self.variables(example))
        except Exception as error:
            raise RowError(f"the chat template's marked twin fails: {shorten(str(error))}") from error
        if rendering.text != text:
            raise RowError("marks in the chat template change what it writes: what the assistant wrote is not known")
        spans = self._tagged(example, rendering) if self.is_marked else self.finder.of(example.messages, rendering)
        return Marked(text, spans, tuple(notices_of(example, rendering, self._words)))

    def _tagged(self, example: ChatExample, rendering: Rendering) -> Spans:
        """The spans of a template's own {% generation %} marks, each with the message that wrote it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {key: value for key, value in self.variables(example).items() if key != "tools"}
        _, tagged = render_jinja_template(
            conversations=[self._form.prepared(example.messages)],
            tools=example.tools,
            chat_template=self.source,
            return_assistant_tokens_mask=True,
            **variables,
        )
        found: Spans = {i: [] for i in assistants(example.messages)}
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
        if not any(found.values()) and any(is_spoken(example.messages[i]) for i in found):
            raise RowError(
                "the {% generation %} marks of the chat template cover no token of this conversation, although it has "
                "assistant text (they must enclose the assistant's content)"
            )
        return found


def special_tokens(tokenizer: Any) -> list[str]:
    """Every token that the tokenizer knows as special, named or only added, longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {str(token) for token in tokenizer.all_special_tokens}
    found |= {token.content for token in added.values() if token.special}
    return sorted((token for token in found if token), key=len, reverse=True)
