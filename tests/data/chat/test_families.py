"""Every published template in the tests' data: all that the assistant says bears loss, and nothing that others say."""

import random
import re
from typing import Any

import pytest

from outcore.data.chat import ChatEncoder
from outcore.data.rows import ChatExample
from outcore.data.sources import RowError
from tests.data.families import FAMILIES, tokenizer_of
from tests.data.generated import PATTERNS, TOOLS, conversation
from tests.data.runs import runs

DROPPED_BESIDE_CALLS = "words beside a tool call are not written by the chat template"

WRITTEN_AHEAD = "<|tool_response>"
"""Gemma 4 writes the beginning of the tool's answer behind the call."""


def named(pattern: str) -> list[dict[str, Any]]:
    """A conversation in which every message says words of its own."""
    messages = conversation(pattern, random.Random(1))
    for number, message in enumerate(messages):
        if message["content"]:
            message["content"] = f"Word{number}first dog Word{number}last"
        if "reasoning_content" in message:
            message["reasoning_content"] = f"Word{number}thought"
        for call in message.get("tool_calls", ()):
            call["id"] = f"functions.{call['function']['name']}:{number}"  # as Kimi wants it; others take any
    return messages


@pytest.mark.more(after=10)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_exactly_what_the_assistant_says_bears_loss(name: str) -> None:
    tokenizer = tokenizer_of(name)
    encoder, trained = ChatEncoder(tokenizer), 0
    for pattern in PATTERNS:
        messages = named(pattern)
        try:
            encoded = encoder.encode(ChatExample(messages, TOOLS if "C" in pattern else None))
        except RowError:
            continue  # the template refuses it, or would leave a part of it out
        ids, has_loss = encoded.ids.tolist(), encoded.has_loss.tolist()
        learned = tokenizer.decode([token for token, has in zip(ids, has_loss) if has])
        given = tokenizer.decode([token for token, has in zip(ids, has_loss) if not has])
        for number, message in enumerate(messages):
            mine, other = (learned, given) if message["role"] == "assistant" else (given, learned)
            said = re.findall(r"Word\d+(?:first|last)", message["content"])
            if not (message.get("tool_calls") and DROPPED_BESIDE_CALLS in encoded.notices):
                assert all(word in mine for word in said), (pattern, number, learned)
            assert not any(word in other for word in said), (pattern, number, learned)
            assert f"Word{number}thought" not in given, (pattern, number, learned)
            for call in message.get("tool_calls", ()):
                assert call["function"]["name"] in learned, (pattern, learned)
        assert pattern != "UE" or not any(has_loss), learned
        header = encoder.template(ChatExample(messages)).finder.habits.header("user")
        assert not header or not any(run.startswith(header) for run in runs(tokenizer, ids, has_loss)), (
            pattern,
            learned,
        )
        if messages[-1]["role"] == "assistant" and pattern != "UE":
            assert has_loss[-1] or tokenizer.decode(ids[-1:]).strip() in ("", WRITTEN_AHEAD), (pattern, learned)
        trained += 1
    assert trained >= 6, "most of the conversations are refused"
