"""Conversations as prompts: the text that training writes of the same rows, under many families' templates."""

import json
from dataclasses import replace
from functools import partial

import pytest

from outcore.data import DataSettings
from outcore.data.chat import ChatEncoder
from outcore.data.rows import ChatExample, detect_shape
from outcore.data.sources import RowError
from outcore.infer.chats import Chat, ChatError, request_of
from outcore.infer.requests import Grammars, Prompts, Sampling
from tests.data.families import tokenizer_of
from tests.data.generated import conversations
from tests.refused import refused

WITH_CALLS = [
    *("qwen3", "llama3_1", "deepseekv3", "gptoss", "mistral_nemo", "glm4moe", "qwen2_5", "qwen3_5_think"),
    *("lfm2_v2", "nemotron_3_nano", "gemma4_v5", "muse_glimmer", "glm_5_1"),
]
WITHOUT_CALLS = ["gemma", "llama3", "zephyr", "kimi_k2"]
"""Kimi K2 writes the id of a call alone, which must say the name; training refuses other ids, too."""


def as_clients_send(messages):
    """The same conversation as OpenAI's clients write it: arguments as JSON text, parts, fields that say nothing."""
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        if message["role"] == "user":
            message["content"] = [{"type": "text", "text": message["content"]}]
        if message["role"] == "assistant":
            message |= {"content": message["content"] or None, "refusal": None, "annotations": [], "audio": None}
            message |= {"reasoning_content": message.get("reasoning_content"), "tool_calls": message.get("tool_calls")}
    return sent


def histories():
    """(messages, tools) before each answer of conversations with and without calls."""
    for _, messages, tools in conversations(seed=3):
        for number, message in enumerate(messages):
            if number and message["role"] == "assistant":
                yield messages[:number], tools


def trained(tokenizer, messages, tools):
    """Text before an answer, of training's own reading and writing."""
    row = {"messages": [*messages, {"role": "assistant", "content": "Yes."}]} | ({"tools": tools} if tools else {})
    example = detect_shape([row], DataSettings(), "x").example(row)
    assert isinstance(example, ChatExample)
    example = replace(example, messages=example.messages[:-1])
    return ChatEncoder(tokenizer).template(example).render(example, generation_prompt=True)


@pytest.mark.more(after=4)
@pytest.mark.parametrize("name", [*WITH_CALLS, *WITHOUT_CALLS])
def test_a_prompt_is_the_text_that_training_writes(name):
    tokenizer, with_calls = tokenizer_of(name), 0
    prompts, takes_tools = Prompts(tokenizer), "tools" in tokenizer.chat_template
    for messages, tools in histories():
        has_calls, tools = any(message.get("tool_calls") for message in messages), tools if takes_tools else None
        ask = partial(Chat, prompts, {"messages": as_clients_send(messages), "tools": tools})
        if has_calls and name in WITHOUT_CALLS:
            refused(ChatError, "refuses this conversation|does not write the tool call 'weather'", ask)
            continue
        try:
            wanted = trained(tokenizer, messages, tools)
        except RowError:  # it takes no such turns
            refused(ChatError, "refuses this conversation", ask)
            continue
        assert ask().ids == tuple(tokenizer(wanted, add_special_tokens=False)["input_ids"])
        with_calls += has_calls
    assert with_calls >= 2 or name in WITHOUT_CALLS


def test_a_developers_words_are_the_systems_where_the_template_knows_no_developer():
    for name, role in (("qwen3", "system"), ("llama3", "system"), ("gptoss", "developer")):
        tokenizer = tokenizer_of(name)
        messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        asked = [{**messages[0], "role": role}, messages[1]]
        wanted = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert Prompts(tokenizer).of_chat(messages)[0] == trained(tokenizer, messages, None) == wanted


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "gemma"])
def test_the_last_message_goes_on_where_that_is_asked(name):
    tokenizer = tokenizer_of(name)
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}]
    chat = Chat(Prompts(tokenizer), {"messages": messages, "continue_final_message": True})
    text = tokenizer.decode(chat.ids, skip_special_tokens=False)
    assert text.endswith("One, two") and chat.goes_on
    asked = request_of({}, "r", chat.ids, Sampling(), Grammars(tokenizer, frozenset()), chat)
    assert asked.goes_on, "its first word keeps the blank before it"
    wanted = tokenizer.apply_chat_template(messages, tokenize=False)
    assert wanted.startswith(tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True))


def test_what_was_refused_before_is_read_as_text():
    tokenizer = tokenizer_of("qwen2_5")
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    for refusal in (said, {"role": "assistant", "content": None, "refusal": "I cannot."}):
        messages = [{"role": "user", "content": "Do it."}, refusal, {"role": "user", "content": "Why?"}]
        assert "I cannot." in Prompts(tokenizer).of_chat(messages)[0]


@pytest.mark.parametrize("calls", ["x", [3], [{"function": "weather"}], [{"function": {"arguments": "{}"}}]])
def test_calls_in_a_history_that_are_none_are_refused(calls):
    messages = [{"role": "user", "content": "Wet?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    refused(ChatError, "list of calls", lambda: Chat(Prompts(tokenizer_of("qwen3")), {"messages": messages}))
