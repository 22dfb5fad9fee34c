"""Conversations by the hundred from a seed: every kind of turn, and what people's data really holds."""

import random
from collections.abc import Iterator
from typing import Any

from tests.data.fixtures import WORDS

PATTERNS = (
    "UA", "UAUA", "SUA", "SUAUAUA", "UAUAUAUA", "A", "AUA", "SAUA", "UAA", "UAAUA", "UCTA", "SUCTAUA", "UCTCTA", "UC",
    "URA", "URUR", "SURUA", "UCTR", "UE", "UEUA",
)  # fmt: skip
"""S system, U user, A answer, R answer with reasoning, C tool call, T its result, E empty answer."""
SPICE = (
    "naïve café — 北京 🙂", "```python\nprint('x')\n```", "1.\n2.\n\n3.", "tab\tand  spaces", "<b>not a token</b>",
    "{\"a\": [1, 2]}", "ends with space ", "\nbegins with a line break", "a < b and [c]", "$x^2$ \\frac{1}{2}",
)  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]


def words(rng: random.Random) -> str:
    """A few words, now and then with what breaks careless code."""
    said = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    return f"{said} {rng.choice(SPICE)}" if rng.random() < 0.3 else said.capitalize() + "."


def conversation(pattern: str, rng: random.Random) -> list[dict[str, Any]]:
    """Messages after one of PATTERNS."""
    messages: list[dict[str, Any]] = []
    for kind in pattern:
        if kind in "SU":
            messages.append({"role": {"S": "system", "U": "user"}[kind], "content": words(rng)})
        elif kind == "T":
            messages.append({"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": words(rng)})
        elif kind == "C":
            call = {"name": "weather", "arguments": {"place": rng.choice(WORDS)}}
            said = words(rng) if rng.random() < 0.3 else ""
            calls = [{"id": "call00001", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": said, "tool_calls": calls})
        elif kind == "R":
            messages.append({"role": "assistant", "reasoning_content": words(rng), "content": words(rng)})
        else:
            messages.append({"role": "assistant", "content": "" if kind == "E" else words(rng)})
    return messages


def conversations(seed: int, each: int = 1) -> Iterator[tuple[str, list[dict[str, Any]], list[Any] | None]]:
    """(pattern, messages, tools), `each` of every pattern."""
    rng = random.Random(seed)
    for _ in range(each):
        for pattern in PATTERNS:
            yield pattern, conversation(pattern, rng), TOOLS if "C" in pattern else None
