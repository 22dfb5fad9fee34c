"""Habits of a chat template: how it begins and ends what the assistant writes, learned once from small conversations.

The header of a turn is what the generation prompt and every rendered turn have in common: the model is given it, so it
carries no loss. What follows (reasoning, words, tool calls, end) the model has to write itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from outcore.data.basis import common_beginning
from outcore.data.chat.marks import Rendering

Message = Mapping[str, Any]
Render = Callable[..., Rendering | None]
"""(messages, generation_prompt=False) -> the rendering; None where the template refuses the conversation."""

ASKED, ASKED_AGAIN, TOLD, TOLD_AGAIN = "Quill hums?", "Fjord bends?", "Vortex blinks.", "Sphinx jogs."
THOUGHT = "Zebra first."
CALL = {"id": "call00001", "type": "function", "function": {"name": "lookup_gizmo", "arguments": {"place": "Ghyll"}}}
NUMBERED_CALL = {**CALL, "id": "functions.lookup_gizmo:0"}
"""Kimi K2 writes the id instead of the name; Mistral refuses ids that are not nine characters long."""
_HALF_TOKEN = re.compile(r"[<\[][^<>\[\]\n]*$")
_THOUGHT = re.compile(r"<think>.*", re.DOTALL)
"""Some generation prompts open the reasoning, or close it at once. It carries loss in every family alike, so that its
end is learned with its beginning."""


@dataclass(frozen=True)
class Habits:
    """Habits that hold for every conversation under one template and tokenizer."""

    headers: Mapping[str, str]
    """Role before the assistant's turn -> the text that the turn begins with and that carries no loss."""
    end: str
    """The special token that ends a turn; "" when the template writes none."""
    openers: Mapping[str, str]
    """Role -> the special token that a message of it begins with, "" if it begins otherwise."""
    prompt: str
    """The generation prompt behind a question."""

    def header(self, role_before: str | None) -> str:
        """Header of a turn behind a message of that role; behind none, or an unknown one, as behind the user's."""
        return self.headers.get(role_before or "user", self.headers.get("user", ""))


def user(words: str) -> dict[str, Any]:
    """A question."""
    return {"role": "user", "content": words}


def told(words: str, **more: Any) -> dict[str, Any]:
    """An answer."""
    return {"role": "assistant", "content": words, **more}


def result_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Make the message with a tool call's result."""
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "Waltz nine"}


def learn(render: Render, specials: Sequence[str], call: Mapping[str, Any]) -> Habits:
    """Habits of the template behind `render`; `specials` are the tokenizer's special tokens, longest first."""
    before: dict[str, list[dict[str, Any]]] = {
        "user": [user(ASKED)],
        "tool": [user(ASKED), told("", tool_calls=[call]), result_of(call)],
        "assistant": [user(ASKED), told("Hedge.")],
        "system": [{"role": "system", "content": "Be brief."}],
    }
    headers = {role: found for role, start in before.items() if (found := _header(render, start)) is not None}
    two_turns = [user(ASKED), told(TOLD), user(ASKED_AGAIN), told(TOLD_AGAIN)]
    rendering = render(two_turns)
    end, openers = "", {}
    if rendering is not None:
        tail = _written(rendering, 1).partition(TOLD)[2].rstrip()
        end = next((token for token in specials if tail.endswith(token)), "")
        openers["user"] = _opener(rendering, 2, specials)
    rendering = render([*before["tool"], told(TOLD)])
    if rendering is not None:
        openers["tool"] = _opener(rendering, 2, specials)
    return Habits(MappingProxyType(headers), end, MappingProxyType(openers), prompt_after(render, before["user"]))


def prompt_after(render: Render, messages: Sequence[Message]) -> str:
    """Find what a generation prompt adds behind these messages; "" where the template has none."""
    without, prompted = render(messages), render(messages, generation_prompt=True)
    if without is None or prompted is None:
        return ""
    if prompted.text.startswith(without.text):
        return prompted.text[len(without.text) :]
    last = len(messages) - 1
    inside, inside_before = _written(prompted, last), _written(without, last)
    added = inside[len(inside_before) :] if inside.startswith(inside_before) else ""
    final = prompted.pieces[-1] if prompted.pieces else None
    if final is not None and final.message is None and (owned := prompted.of(last)) and final.start >= owned[-1].end:
        added += prompted.text[final.start : final.end]
    return added


def _header(render: Render, start: list[dict[str, Any]]) -> str | None:
    """The common beginning of turns behind `start`; None when the template refuses all of them."""
    at = len(start)
    turns = (
        [*start, told(TOLD)],
        [*start, told(TOLD), user(ASKED_AGAIN), told(TOLD_AGAIN)],
        [*start, told(TOLD, reasoning_content=THOUGHT, thinking=THOUGHT)],
    )
    leads = []
    for turn in turns:
        rendering = render(turn)
        if rendering is not None and TOLD in (written := _written(rendering, at)):
            leads.append(written.partition(TOLD)[0])
    if not leads:
        return None
    shared = common_beginning(leads)
    shared = shared if shared in leads else _HALF_TOKEN.sub("", shared)
    prompt = prompt_after(render, start)
    # Some templates end the message before only in the prompt: the header begins somewhere inside of it.
    tails = [prompt[at:] for at in range(len(prompt))]
    header = max((common_beginning([shared, tail]) for tail in tails), key=len, default="")
    if not header.strip():
        header = _THOUGHT.sub("", shared).rstrip(" ")  # words begin with the space before them
        return header if header.strip() else ""
    whole = header == shared or any(tail == header for tail in tails)
    return _THOUGHT.sub("", header if whole else _HALF_TOKEN.sub("", header))


def _written(rendering: Rendering, message: int) -> str:
    return "".join(rendering.text[piece.start : piece.end] for piece in rendering.of(message))


def _opener(rendering: Rendering, message: int, specials: Sequence[str]) -> str:
    written = _written(rendering, message)
    return next((token for token in specials if written.startswith(token)), "")
