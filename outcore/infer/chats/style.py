"""Style of a model's calls of tools and thoughts, learned from its own chat template by having it write some.

A conversation with calls of made-up names goes through the template; what stands around the names is the family's form.
So a call that is written in this form reads, in the next prompt, token for token as it was written, and its keys and
values are found again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outcore.infer.requests import Prompts

ANALYSIS = "<|channel|>analysis<|message|>"
NEXT_TURN = "<|end|><|start|>assistant"
ALOUD = ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>")
"""Marks of gpt-oss, whose answers are turns in channels: before a thought, behind it, before what it says aloud."""
THOUGHTS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    (ANALYSIS, "<|end|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
"""Marks around what is not said aloud. The first: Qwen, DeepSeek, GLM, Kimi, MiniMax, Nemotron, SmolLM, Olmo, Phi; then
Seed, Mistral, gpt-oss, Gemma, EXAONE."""
ANY = "\ue000"
"""In a style: letters and digits that number a call."""
NUMBER = "[A-Za-z0-9_.:-]{1,64}"


@dataclass(frozen=True)
class Pairs:
    """Arguments one by one: `head` (KEY `is_` VALUE `end`, with `begin` before each KEY)*. Texts stand as they are."""

    begin: str
    is_: str
    end: str


@dataclass(frozen=True)
class CallStyle:
    """`open` NAME `between` ARGUMENTS (`next` NAME `between` ARGUMENTS)* `close`."""

    open: str = '<tool_call>\n{"name": "'
    between: str = '", "arguments": '
    next: str = '}\n</tool_call>\n<tool_call>\n{"name": "'
    """Between two calls; '' where an answer has one alone."""
    close: str = "}\n</tool_call>"
    pairs: Pairs | None = None
    """Marks of arguments that are written one by one; None: they are JSON."""
    in_channels: bool = False
    """Whether an answer is of turns in channels, as gpt-oss writes it."""

    @property
    def trigger(self) -> str:
        """Text that only a call begins with."""
        if self.in_channels:
            return self.open
        mark = re.match(r"[^\s{\"]*", self.open)
        return mark[0] if mark and mark[0] else self.open

    @property
    def is_first(self) -> bool:
        """Whether a call is known by being the answer's beginning: JSON without a mark, which a text may hold, too."""
        return self.trigger.startswith("{")

    @property
    def end_mark(self) -> str:
        """Mark that ends a call which is not written as it should be; '' where none does."""
        return self.close.strip().lstrip("}").strip() or ""


CHANNELS = CallStyle(
    "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", next="", close="", in_channels=True
)
"""Calls of gpt-oss, not learned: its template writes the name in another place than the model does."""


def common(one: str, other: str, marks: Iterable[str] = ()) -> str:
    """Longest beginning of both texts that cuts no mark in two."""
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    for mark in marks:
        at = one.find(mark, max(0, length - len(mark) + 1))
        length = at if 0 <= at < length < at + len(mark) else length
    return one[:length]


def thought_of(tokenizer: Any) -> tuple[str, str] | None:
    """Marks around this model's thoughts; None where its template speaks of none."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return next((marks for marks in THOUGHTS if marks[1] in template and marks[0].strip() in template), None)


def specials_of(tokenizer: Any) -> dict[str, int]:
    """Tokens that stand for a mark as a whole, and their ids, longest first: forms name them by number."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {
        token.content: number
        for number, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }
    return dict(sorted(found.items(), key=lambda one: -len(one[0])))


def hidden_of(tokenizer: Any) -> list[str]:
    """Marks that are left out of a text unless they are asked for."""
    return [token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special]


def style_of(prompts: Prompts) -> CallStyle:
    """The style of this model; the usual one where its template does not show it."""
    template = str(getattr(prompts.tokenizer, "chat_template", None) or "")
    if ANALYSIS in template:
        return CHANNELS
    if template not in prompts.learned:
        prompts.learned[template] = _learned(prompts)
    return prompts.learned[template]


ASKED, WORD, NEXT, RESULT = "zqask", "zqword", "zqnext", "zqresult"
NAMES, ARGUMENTS = ("zqfone", "zqftwo"), {"zqka": "zqva", "zqkb": "zqvb"}
NUMBERS = (("functions.zqfone:0", "functions.zqftwo:1"), ("zq0000001", "zq0000002"))
"""Names of calls that templates insist on: Kimi's, Mistral's."""
_JSON = re.compile(r'\{\s*"zqka":\s*"zqva",\s*"zqkb":\s*"zqvb"\s*\}')


def _learned(prompts: Prompts) -> CallStyle:
    for numbers in NUMBERS:
        try:
            one = _Written(prompts, numbers[:1])
        except ValueError:  # another template's insistence, or one that writes no calls
            continue
        try:
            two: _Written | None = _Written(prompts, numbers)
        except ValueError:
            two = None
        if found := one.style(two):
            return found
    return CallStyle()


class _Written:
    """A conversation with so many calls as the template writes it, from the question on."""

    def __init__(self, prompts: Prompts, numbers: tuple[str, ...]) -> None:
        self._prompts, self._numbers = prompts, numbers
        calls = [
            {"id": number, "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
            for name, number in zip(NAMES, numbers, strict=False)
        ]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": RESULT}
            for call in calls
        ]
        user = {"role": "user", "content": ASKED}
        self.text = self._told([user, {"role": "assistant", "content": "", "tool_calls": calls}, *results])
        self._plain = self._told([user, {"role": "assistant", "content": WORD}, {"role": "user", "content": NEXT}])

    def _told(self, messages: list[Mapping[str, Any]]) -> str:
        schema = {"type": "object", "properties": {key: {"type": "string"} for key in ARGUMENTS}}
        tools = [
            {"type": "function", "function": {"name": name, "description": "zq", "parameters": schema}}
            for name in NAMES
        ]
        text = self._prompts.of_chat(messages, tools)[0]
        return text[text.rfind(ASKED) + len(ASKED) :]

    def style(self, two: _Written | None) -> CallStyle | None:
        """Learn the style by what stands around the names; None where they are not written."""
        if NAMES[0] not in self.text or RESULT not in self.text or WORD not in self._plain:
            return None
        before, _, behind = self.text.partition(NAMES[0])
        header, _, turn = self._plain.partition(WORD)
        opened = before[len(common(before, header)) :]
        for _, end in THOUGHTS:
            opened = opened.rpartition(end)[2].lstrip("\n") if end in opened else opened
        behind = behind.partition(RESULT)[0]
        found = self._around(behind, two)
        if not opened.strip() or found is None:
            return None
        between, rest, pairs = found
        ends = [mark for mark in specials_of(self._prompts.tokenizer) if mark in turn]
        end = min(ends, key=turn.find, default="")
        close = rest.partition(end)[0] if end and end in rest else rest.strip()
        if pairs is not None:
            pairs, between, close = _parted(pairs, between, close)
        style = CallStyle(_masked(opened), _masked(between), "", _masked(close), pairs)
        return style if two is None else _with_next(style, two)

    def _around(self, behind: str, two: _Written | None) -> tuple[str, str, Pairs | None] | None:
        if (json_args := _JSON.search(behind)) is not None:
            return behind[: json_args.start()], behind[json_args.end() :], None
        places = [behind.find(word) for word in ("zqka", "zqva", "zqkb", "zqvb")]
        if min(places) < 0 or places != sorted(places):
            return None
        key, value, second, last = places
        pairs = Pairs("", behind[key + 4 : value], behind[value + 4 : second])
        return behind[:key], behind[last + 4 :], pairs


def _parted(pairs: Pairs, between: str, close: str) -> tuple[Pairs, str, str]:
    """Split what stands between two arguments into the end of one and the beginning of the next."""
    end = common(pairs.end, close)
    begin = pairs.end[len(end) :]
    head = between.removesuffix(begin)
    return Pairs(begin, pairs.is_, end), head, close[len(end) :]


def _masked(text: str) -> str:
    """A part without the made-up numbers of calls."""
    for number in ("zq0000001", "zq0000002"):
        text = text.replace(number, ANY)
    return re.sub(r"(?<=:)[01](?=<)", ANY, text)


def _with_next(style: CallStyle, two: _Written) -> CallStyle:
    second = two.text.find(NAMES[1])
    first = two.text.find(NAMES[0])
    if first < 0 or second < 0 or RESULT in two.text[first:second]:
        return style
    behind = two.text[first + len(NAMES[0]) : second]
    last = _JSON.search(behind)
    at = last.end() if last else behind.rfind("zqvb") + 4
    between = _masked(behind[at:])
    if style.pairs is not None:
        between = between.removeprefix(style.pairs.end)
    return CallStyle(style.open, style.between, between, style.close, style.pairs)
