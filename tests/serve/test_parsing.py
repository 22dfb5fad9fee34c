"""Reasoning and calls of tools told apart while text arrives, wherever it is cut."""

import json

import pytest

from outcore.serve.parsing import AnswerParser, TemplateParser

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


TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<|reason|>", "close": "<|/reason|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<|call|>".replace("|", r"\|"), "close": "<|/call|>", "repeats": True,
            "content": "json", "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}  # fmt: skip


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_a_tokenizers_own_template_is_read_by_transformers_parser(step):
    text = '<|reason|>let me see<|/reason|>Hello.\n<|call|>{"name": "look", "arguments": {"at": 3}}<|/call|>'
    parser = TemplateParser("c", TEMPLATE, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", [])
    told = [parser.add(text[at : at + step]) for at in range(0, len(text), step)] + [parser.finish()]
    assert parser.whole.reasoning == "".join(one.reasoning for one in told) == "let me see"
    assert parser.whole.content.strip() == "Hello." and parser.whole.content == "".join(one.content for one in told)
    (call,) = parser.whole.tool_calls
    assert call["function"] == {"name": "look", "arguments": '{"at": 3}'} and call["id"] == "call-c-0"


def test_a_call_that_is_cut_off_is_told_as_text_of_the_template_too():
    parser = TemplateParser("c", TEMPLATE, "<|im_start|>assistant\n", [])
    parser.add('Yes.<|call|>{"name": "lo')
    parser.finish()
    assert parser.whole.content.startswith("Yes.") and "lo" in parser.whole.content and not parser.whole.tool_calls
