"""Shapes of rows and chat templates: what the model learns to write is exactly what the assistant wrote."""

from collections import Counter

import pytest

from outcore.data import DataError, DataSettings, TemplateError
from outcore.data.cache.encode import DocumentEncoder, carries_loss, cut_text, token_ids
from outcore.data.chat import ChatEncoder, default_template, ensure_chat_template
from outcore.data.rows import ChatExample, TextExample, detect_shape
from outcore.data.sources.records import RowError
from tests.data.fixtures import tiny_tokenizer
from tests.data.runs import runs
from tests.refused import refused

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the quick fox?"},
    {"role": "assistant", "content": "a lazy dog"},
    {"role": "user", "content": "wizards?"},
    {"role": "assistant", "content": "boil jars"},
]
PLAIN_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode(tokenizer, example, **settings):
    encoded = ChatEncoder(tokenizer, **settings).encode(example)
    return encoded.ids, encoded.has_loss


def learned(tokenizer, ids, mask) -> list[str]:
    """The runs of tokens that carry loss, decoded."""
    return runs(tokenizer, ids.tolist(), mask.tolist())


@pytest.mark.parametrize("template", [
    # The text is written behind the loop, where nothing tells who said what.
    "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.role + ': ' + m.content + '\n' %}"
    "{% endfor %}{{ ns.t }}",
    # Earlier answers are rewritten.
    "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' and not loop.last %}(removed)"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}",
])  # fmt: skip
def test_template_that_hides_the_assistant_is_refused(template):
    with pytest.raises(TemplateError, match=r"does not let the assistant's tokens be told apart.*generation"):
        encode(tiny_tokenizer(template), ChatExample(TALK))
    ids, mask = encode(tiny_tokenizer(template), ChatExample(TALK), train_on_all=True)
    assert mask.all() and len(ids) == len(mask)


def test_generation_marks_are_taken_as_they_are():
    template = (
        "{% for m in messages %}{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }};{% endif %}{% endfor %}"
    )
    tokenizer = tiny_tokenizer(template)
    assert learned(tokenizer, *encode(tokenizer, ChatExample(TALK))) == ["boil jars"]


def test_generation_marks_around_nothing_are_refused():
    template = "{% for m in messages %}{% generation %}{% endgeneration %}{{ m.content }}{% endfor %}"
    refused(TemplateError, "cover no token", lambda: encode(tiny_tokenizer(template), ChatExample(TALK)))


def test_template_that_refuses_a_role_is_a_bad_row():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN_CHATML
    with pytest.raises(RowError, match="refuses this conversation: no system role"):
        encode(tiny_tokenizer(template), ChatExample(TALK))


def test_default_template_is_given_once_and_ends_turns_with_eos_if_need_be():
    tokenizer = tiny_tokenizer(None)
    assert "ChatML" in (ensure_chat_template(tokenizer) or "")
    assert ensure_chat_template(tokenizer) is None

    class NoChatTokens:
        unk_token_id, eos_token = None, "</s>"

        def convert_tokens_to_ids(self, _):
            return None

    assert "eos_token" in default_template(NoChatTokens())


class NoOffsets:
    """The tiny tokenizer, pretending to be one of the slow kind."""

    def __init__(self, tokenizer):
        self.tokenizer, self.is_fast = tokenizer, False

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *args, **kwargs):
        assert "return_offsets_mapping" not in kwargs
        return self.tokenizer(*args, **kwargs)


def test_tokenizers_without_offsets():
    tokenizer = NoOffsets(tiny_tokenizer(PLAIN_CHATML))
    ids, mask = encode(tokenizer, ChatExample(TALK))
    assert learned(tokenizer, ids, mask) == ["a lazy dog<|im_end|>\n", "boil jars<|im_end|>\n"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TALK, tokenize=False)


# --- shapes -----------------------------------------------------------------------------------------------------------

SHAPES = {
    "text": {"text": "x", "url": "y"},
    "prompt_completion": {"question": "x", "answer": "y"},
    "alpaca": {"instruction": "x", "input": "z", "output": "y", "text": "all"},
    "sharegpt": {"id": "1", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    "messages": {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_told_apart(name: str):
    shape = detect_shape([SHAPES[name]], DataSettings(), "x.jsonl")
    assert shape.format == name
    example = shape.example(SHAPES[name])
    assert isinstance(example, TextExample if name in ("text", "prompt_completion") else ChatExample)
    if name == "alpaca":
        assert isinstance(example, ChatExample) and example.messages[0]["content"] == "x\n\nz"


def test_named_columns_and_formats_win():
    row = {**SHAPES["alpaca"], "body2": "t", **SHAPES["messages"]}
    assert detect_shape([row], DataSettings(), "x").format == "messages"
    assert detect_shape([row], DataSettings(format="alpaca"), "x").format == "alpaca"
    assert detect_shape([row], DataSettings(format="text"), "x").columns == ("text",)
    assert detect_shape([row], DataSettings(text_column="body2"), "x").columns == ("body2",)
    chosen = detect_shape([row], DataSettings(prompt_column="input", completion_column="text"), "x")
    assert chosen.columns == ("input", "text")
    with pytest.raises(DataError, match="In small letters they would be read as prompt_completion"):
        detect_shape([{"Prompt": "a", "Completion": "b"}], DataSettings(), "x.csv")
    assert detect_shape([{"only": "text"}], DataSettings(), "x").columns == ("only",)
    sharegpt_name = {"conversations": SHAPES["messages"]["messages"]}
    assert detect_shape([sharegpt_name], DataSettings(), "x").format == "messages"


@pytest.mark.parametrize(("settings", "words"), [
    ({"text_column": "txet"}, r"no column 'txet' \(text_column\) \(nearest: 'text'\); it has: text, n"),
    ({"prompt_column": "text", "completion_column": "anwser"}, "no column 'anwser'"),
    ({"messages_column": "msgs"}, "no column 'msgs'"), ({"format": "messages"}, "not the shape 'messages'"),
])  # fmt: skip
def test_columns_that_are_not_there(settings, words):
    refused(DataError, words, lambda: detect_shape([{"text": "a", "n": 1}], DataSettings(**settings), "x.csv"))


def talk(*messages, **more):
    return {"messages": list(messages), **more}


@pytest.mark.parametrize(("name", "row", "words"), [
    ("text", {"txt": "x"}, "no column 'text' .nearest: 'txt'"),
    ("text", {"text": None}, "should hold text, found nothing"), ("text", {"text": 7}, "should hold text, found int 7"),
    ("prompt_completion", {"question": "x", "answer": " "}, "'answer' is empty"),
    ("alpaca", {"instruction": "x", "output": ""}, "'output' is empty"),
    ("messages", {"messages": "hi"}, "should hold a list of messages"),
    ("messages", {"messages": []}, "should hold a list of messages"),
    ("messages", talk("hi"), "message 1 of 'messages' is not an object"),
    ("messages", talk({"role": "user"}), "message 1 of 'messages' has no 'content'"),
    ("messages", talk({"role": "robot", "content": "x"}), "unknown role 'robot'"),
    ("messages", talk({"role": "user", "content": "x"}), "no assistant message"),
    ("messages", talk({"role": "user", "content": {"a": 3}}), "should be text, found dict"),
    ("messages", talk({"role": "user", "content": [{"type": "image"}]}), "a part that is not text"),
    ("sharegpt", {"conversations": [{"from": "alien", "value": "x"}]}, "unknown role 'alien'"),
])  # fmt: skip
def test_rows_that_cannot_be_used(name, row, words):
    shape = detect_shape([SHAPES[name]], DataSettings(), "x")
    refused(RowError, words, lambda: shape.example(row))


def test_messages_with_text_parts_system_column_and_tool_calls():
    row = talk(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        system="Be kind.",
        tools=[{"name": "f"}],
    )
    example = detect_shape([row], DataSettings(), "x").example(row)
    assert isinstance(example, ChatExample) and example.tools == [{"name": "f"}]
    assert [message["content"] for message in example.messages] == ["Be kind.", "ab", ""]


# --- encoding ---------------------------------------------------------------------------------------------------------


def test_a_tokenizer_without_end_token_is_refused():
    class Bare:
        eos_token_id = sep_token_id = None

    refused(DataError, "no end-of-text token", DocumentEncoder(Bare()).end_token_id)


@pytest.mark.parametrize(
    "text",
    ["line one\nline two\n\n  indented\n" * 40, "no breaks at all " * 60, "x" * 999, "", "\n" * 500],
)
@pytest.mark.parametrize("piece_chars", [16, 64, 333, 10_000])
def test_cut_text_loses_nothing(text: str, piece_chars: int):
    pieces = list(cut_text(text, piece_chars))
    assert "".join(pieces) == text and all(0 < len(piece) <= piece_chars for piece in pieces)


def test_encoder_decoder_documents():
    tokenizer = tiny_tokenizer()
    encoder = DocumentEncoder(tokenizer, encoder_decoder=True)
    tokens = encoder.encode(TextExample("a dog", prompt="the fox"))
    assert tokenizer.decode(token_ids(tokens)) == "the fox<|endoftext|>a dog<|endoftext|>"
    assert learned(tokenizer, token_ids(tokens), carries_loss(tokens)) == ["a dog<|endoftext|>"]
    chat = encoder.encode(ChatExample(TALK))
    assert learned(tokenizer, token_ids(chat), carries_loss(chat)) == ["boil jars<|endoftext|>"]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "jars"}}}
    calling = ChatExample([*TALK[:-1], {"role": "assistant", "content": "boil jars", "tool_calls": [call]}])
    thinking = ChatExample([*TALK[:-1], {"role": "assistant", "content": "boil jars", "reasoning_content": "hm"}])
    notices: Counter[str] = Counter()
    refused, thought = encoder.encode_many([calling, thinking], notices)
    assert isinstance(refused, RowError) and "calls tools, and an encoder-decoder" in str(refused)
    assert not isinstance(thought, RowError) and token_ids(thought).tolist() == token_ids(chat).tolist()
    assert any("reasoning of the last answer is not trained" in notice for notice in notices)
