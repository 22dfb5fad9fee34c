"""Reasoning and calls of tools told apart while text arrives, wherever it is cut."""

from __future__ import annotations

import json

import pytest

from outcore.serve.parsing import AnswerParser

TEXT = (
    'a<think>\nwhy < not</think>b <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    "<tool_call>broken</tool_call> c <thin"
)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 200])
def test_all_cuts_give_the_same(step):
    parser = AnswerParser("r", frozenset({"reasoning", "tool"}))
    content = reasoning = ""
    calls = []
    for at in range(0, len(TEXT), step):
        new = parser.add(TEXT[at : at + step])
        content, reasoning, calls = content + new.content, reasoning + new.reasoning, calls + new.tool_calls
    new = parser.finish()
    content += new.content
    assert content == parser.whole.content == "ab <tool_call>broken</tool_call> c <thin"
    assert reasoning.strip() == "why < not"
    assert [call["function"]["name"] for call in calls] == ["f"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"x": 1}


def test_marks_that_the_model_does_not_know_are_text():
    parser = AnswerParser("r", frozenset())
    assert parser.add(TEXT).content + parser.finish().content == TEXT


def test_a_prompt_that_opens_reasoning_and_a_call_cut_off():
    parser = AnswerParser("r", frozenset({"reasoning", "tool"}), "reasoning")
    parser.add("thought</think>said <tool_call>{")
    parser.finish()
    assert parser.whole.reasoning == "thought" and parser.whole.content == "said <tool_call>{"
