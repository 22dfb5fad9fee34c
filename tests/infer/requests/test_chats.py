"""Reasoning and calls of tools told apart while text arrives, wherever it is cut; chats in lines of a job."""

import copy
import json

import pytest

from outcore.infer import Answer, Sampling
from outcore.infer.chats import AnswerParser, CallStyle, Chat, ChatError, Parsed, Reads, TemplateParser
from outcore.infer.commands import read_line, result_of
from outcore.infer.requests import Grammars, Prompts
from tests.refused import refused

THINK = ("<think>", "</think>")
TEXT = (
    'a<think>\nwhy < not</think>\n\nb <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    "<tool_call>broken</tool_call> c <thin"
)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 200])
def test_all_cuts_give_the_same(step):
    parser = AnswerParser("r", Reads(THINK, CallStyle()))
    told = Parsed()
    for at in range(0, len(TEXT), step):
        told.take(parser.add(TEXT[at : at + step]))
    told.take(parser.finish())
    assert told == parser.whole and told.content == "ab <tool_call>broken</tool_call> c <thin"
    assert told.reasoning.strip() == "why < not"
    assert [call["function"]["name"] for call in told.tool_calls] == ["f"]
    assert json.loads(told.tool_calls[0]["function"]["arguments"]) == {"x": 1}


def test_marks_that_the_model_does_not_know_are_text():
    parser = AnswerParser("r", Reads())
    assert parser.add(TEXT).content + parser.finish().content == TEXT


def test_a_prompt_that_opens_reasoning_and_a_call_cut_off():
    parser = AnswerParser("r", Reads(THINK, CallStyle(), "reasoning"))
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


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("call", [
    "{bad", "[1]", '{"name": "look", "arguments": {"at": "\\ud83d"}}', '{"name": "look", "arguments": "at 3"}',
    '{"name": "look", "arguments": {"at": 1e999}}',
])  # fmt: skip
def test_what_is_no_call_is_text_of_the_template_too(step, call):
    parser, text = TemplateParser("c", TEMPLATE, "<|im_start|>assistant\n", []), f"Yes.<|call|>{call}<|/call|> So."
    told = [parser.add(text[at : at + step]) for at in range(0, len(text), step)] + [parser.finish()]
    assert not parser.whole.tool_calls and parser.whole.content == "".join(one.content for one in told)
    assert parser.whole.content.startswith("Yes.") and call in parser.whole.content
    assert parser.whole.content.endswith(" So.")


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}
CALLED = '<think>so</think>Now <tool_call>{"name": "look", "arguments": {}}</tool_call>'
KNOWS_TOOLS = "{% for t in tools or [] %}T{% endfor %}{{ messages[0].content }}<think></think>"


@pytest.fixture
def prompts(tiny_folder):
    """Those of a model whose template knows tools and reasoning."""
    tokenizer = copy.deepcopy(tiny_folder[2])
    tokenizer.chat_template = KNOWS_TOOLS
    return Prompts(tokenizer)


def result(prompts, entry, text, count=1):
    """What a job writes for this line, where each answer is `text`."""
    line = read_line(0, json.dumps(entry), prompts, Grammars(prompts.tokenizer, frozenset()), lambda n: Sampling())
    answers = [Answer("line-0", choice, text, (), "stop") for choice in range(count)]
    return result_of(line, answers, prompts.tokenizer, "tiny", 0), line


def test_tools_of_a_line_reach_the_model_and_its_calls_the_result(prompts):
    found, line = result(prompts, ASKED | {"tools": [LOOK]}, CALLED)
    assert prompts.tokenizer.decode(line.request.prompt).startswith("THi")
    assert found["text"] == "Now " and found["reasoning_content"] == "so" and found["finish_reason"] == "tool_calls"
    assert found["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    several, _ = result(prompts, ASKED | {"tools": [LOOK], "n": 2}, CALLED, 2)
    assert len({calls[0]["id"] for calls in several["tool_calls"]}) == 2 and several["texts"] == ["Now ", "Now "]
    batch = {"custom_id": "a", "url": "/v1/chat/completions", "body": ASKED | {"tools": [LOOK]}}
    choice = result(prompts, batch, CALLED)[0]["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Now "
    assert choice["message"]["tool_calls"] == found["tool_calls"]
    assert "tool_calls" not in result(prompts, ASKED, CALLED)[0], "a chat without tools has no calls"


def test_half_a_letter_in_a_call_is_neither_written_nor_harmful(prompts):
    said = '<tool_call>\n{"name": "look", "arguments": {"at": "\\ud83d"}}\n</tool_call>'
    found, line = result(prompts, ASKED | {"tools": [LOOK]}, said)
    assert json.dumps(found, ensure_ascii=False).encode()
    ids = prompts.tokenizer(said, add_special_tokens=False)["input_ids"]
    told = prompts.tokenizer.decode(ids[: line.request.grammar.matcher().count_allowed(ids)])
    assert "d83d" not in told, "letters are written as they are"


def test_one_call_is_told_of_a_tokenizers_own_template_where_one_is_asked_for(prompts):
    prompts.tokenizer.response_template = TEMPLATE
    call = '<|call|>{"name": "look", "arguments": {"at": %d}}<|/call|>'
    for parallel, wanted in ((True, ['{"at": 1}', '{"at": 2}']), (False, ['{"at": 1}'])):
        chat = Chat(prompts, ASKED | {"tools": [LOOK], "parallel_tool_calls": parallel})
        told = chat.parts_of("r", call % 1 + call % 2)
        assert [one["function"]["arguments"] for one in told.tool_calls] == wanted and not told.content


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"prompt": "Hi", "tools": [LOOK]}, "unknown field 'tools'"),
        (ASKED | {"tools": "look"}, "must be a list of functions"),
        (ASKED | {"tools": [LOOK], "tool_choice": "any"}, "auto, none, required, or name a function"),
        (ASKED | {"tool_choice": "required"}, "tools has no such function"),
        (ASKED | {"continue_final_message": "yes"}, "must be true or false"),
        (ASKED | {"continue_final_message": True, "add_generation_prompt": True}, "each other's opposite"),
        (ASKED | {"logprobs": 3}, "logprobs must be true or false"),
        (ASKED | {"prompt": "Hi"}, "either prompt or messages"),
        ({"url": "/v1/completions", "body": ASKED}, "body must have prompt"),
    ],
)
def test_a_line_of_a_chat_that_cannot_be_says_why(prompts, entry, words):
    assert words in str(result(prompts, entry, "")[0]["error"])


@pytest.mark.parametrize("thought", ["", "let me see</think>\n\n"])
def test_a_forced_call_may_be_thought_about_where_the_prompt_begins_a_thought(prompts, thought):
    pytest.importorskip("llguidance")
    prompts.tokenizer.chat_template = KNOWS_TOOLS + ("<think>" if thought else "")
    chat = Chat(prompts, ASKED | {"tools": [LOOK], "tool_choice": "required"})
    said = thought + '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    ids = prompts.tokenizer(said, add_special_tokens=False)["input_ids"]
    form = Grammars(prompts.tokenizer, frozenset({prompts.tokenizer.eos_token_id})).of(*chat.form)
    assert form is not None and form.matcher().count_allowed(ids) == len(ids)
    parts = chat.parts_of("r", said)
    assert [call["function"]["name"] for call in parts.tool_calls] == ["look"] and not parts.content
    assert parts.reasoning == thought.partition("<")[0]


def test_tools_that_a_template_does_not_know_are_refused(prompts):
    prompts.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ChatError, match="knows no tools"):
        Chat(prompts, ASKED | {"tools": [LOOK]})


def test_bytes_that_are_no_text_are_refused_in_words(prompts):
    """As a terminal or a command line gives them."""
    odd = b"a \xff b".decode(errors="surrogateescape")
    for ask in (lambda: prompts.of_text(odd), lambda: prompts.of_messages([{"role": "user", "content": odd}])):
        refused(ValueError, "no UTF-8", ask)
