"""Which tokens bear loss, from rows in a file to the trained labels: each test is a fault that once trained wrongly."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from outcore.data import DataError, DataSettings, PreparedData, prepare_data
from tests.data.families import tokenizer_of
from tests.data.fixtures import tiny_tokenizer, write_jsonl
from tests.data.runs import runs

CALL = {"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": {"place": "dog"}}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "lookup", "content": "seven jars"}


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def told(words: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": words, **more}


def prepared(folder: Path, rows: list[Any], tokenizer: Any, **settings: Any) -> PreparedData:
    path = write_jsonl(folder / "rows.jsonl", rows)
    chosen = {"seq_length": 2048, "packing": "off", "eval_fraction": 0, **settings}
    return prepare_data(DataSettings(dataset=str(path), cache_dir=str(folder / "cache"), **chosen), tokenizer)


def learned(folder: Path, row: Any, tokenizer: Any, **settings: Any) -> list[str]:
    """The runs of tokens with loss of one row, decoded."""
    tokenizer = tokenizer_of(tokenizer) if isinstance(tokenizer, str) else tokenizer
    labels = prepared(folder, [row], tokenizer, **settings).train.batch([0])["labels"][0].tolist()
    return runs(tokenizer, labels, [label >= 0 for label in labels])


# --- wrong loss, silently ---------------------------------------------------------------------------------------------


def test_tool_calls_of_qwen3_are_trained(tmp_path: Path):
    row = {"messages": [user("the fox?"), told("", tool_calls=[CALL]), RESULT, told("jars")]}
    call = '<tool_call>\n{"name": "lookup", "arguments": {"place": "dog"}}\n</tool_call><|im_end|>\n'
    end = "<think>\n\n</think>\n\njars<|im_end|>\n"
    assert learned(tmp_path, row, "qwen3") == [call, end]
    row["messages"][1] = told("quick", tool_calls=[CALL])
    assert learned(tmp_path, row, "qwen3") == [f"quick\n{call}", end]


@pytest.mark.parametrize(("name", "ends"), [
    ("phi3", ["<|end|>\n", "<|end|>\n", "<|end|>\n<|endoftext|>"]), ("qwen3", ["<|im_end|>\n"] * 3),
    ("glm4moe", ["<|user|>"] * 3),
])  # fmt: skip
def test_every_turn_ends_with_loss(tmp_path: Path, name: str, ends: list[str]):
    talk = [user("a?"), told("quick fox  \n"), user("b?"), told("dog"), user("c?"), told("jars")]
    runs = learned(tmp_path, {"messages": talk}, name)
    assert len(runs) == 3 and all(run.endswith(end) for run, end in zip(runs, ends)), runs


@pytest.mark.parametrize("nothing", [None, "", " \n"])
def test_an_empty_answer_is_not_trained(tmp_path: Path, nothing: str | None):
    empty = {"role": "assistant", "content": nothing}
    data = prepared(tmp_path, [{"messages": [user("a?"), empty, user("b?"), told("jars")]}], tokenizer_of("qwen2_5"))
    assert data.summary.loss_tokens == len(tokenizer_of("qwen2_5")("jars<|im_end|>\n")["input_ids"])
    assert any("answers without words" in line and "(1 row)" in line for line in data.summary.lines())
    for row in ({"messages": [user("a?"), empty]}, {"prompt": [user("a?")], "completion": [empty]}):
        with pytest.raises(DataError, match="no assistant message with words, reasoning or tool calls: nothing to"):
            prepared(tmp_path, [row], tokenizer_of("qwen2_5"))


def test_an_end_that_is_added_is_said(tmp_path: Path):
    data = prepared(tmp_path, [{"messages": [user("a?"), told("quick")]}], tokenizer_of("glm4moe"))
    assert any("'<|user|>' is added" in line and "(1 row)" in line for line in data.summary.lines())


@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "qwen3", "lfm2_v2", "nemotron_3_nano", "phi3", "glm4moe"])
def test_a_conversation_may_begin_with_the_assistant(tmp_path: Path, name: str):
    runs = learned(tmp_path, {"messages": [told("quick fox"), user("b?"), told("jars")]}, name)
    for run, words in zip(runs, ("quick fox", "jars"), strict=True):
        before, _, end = run.partition(words)
        assert before.strip() in ("", "<think></think>", "<think>\n\n</think>") and len(end) < 24, run


def test_the_tools_answer_of_gemma4_is_not_trained(tmp_path: Path):
    call = '<|tool_call>call:lookup{place:<|"|>dog<|"|>}<tool_call|>'
    talk = [user("the fox?"), told("", tool_calls=[CALL])]
    assert learned(tmp_path, {"messages": talk}, "gemma4_v5") == [call]
    assert learned(tmp_path, {"messages": [*talk, RESULT, told("jars")]}, "gemma4_v5") == [call, "jars<turn|>\n"]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"training": False}])
def test_an_answer_marked_bad_is_not_trained(tmp_path: Path, mark: dict[str, Any]):
    talk = [user("a?"), told("quick", **mark), user("b?"), told("jars", weight=1)]
    assert learned(tmp_path, {"messages": talk}, tiny_tokenizer()) == ["jars<|im_end|>"]
    sharegpt = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "quick", **mark},
                {"from": "human", "value": "b?"}, {"from": "gpt", "value": "jars"}]  # fmt: skip
    assert learned(tmp_path, {"conversations": sharegpt}, tiny_tokenizer()) == ["jars<|im_end|>"]


@pytest.mark.parametrize(
    ("message", "words"),
    [(told("x", weight=0.5), "weight 0.5; only 0"), ({**user("x"), "train": True}, "asks to train on a user message")],
)
def test_loss_that_cannot_be_given_is_refused(tmp_path: Path, message: dict[str, Any], words: str):
    with pytest.raises(DataError, match=words):
        learned(tmp_path, {"messages": [user("a?"), message, told("jars")]}, tiny_tokenizer())


def test_answers_in_a_prompt_are_not_trained(tmp_path: Path):
    row = {"prompt": [user("a?"), told("quick"), user("b?")], "completion": [told("jars")]}
    assert learned(tmp_path, row, tiny_tokenizer()) == ["jars<|im_end|>"]


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "brief"}]])
def test_a_chosen_answer_that_repeats_the_question_holds_it_once(tmp_path: Path, system: list):
    tokenizer = tiny_tokenizer()
    row = {"prompt": "the fox?", "chosen": [*system, user("the fox?"), told("quick")], "rejected": [told("jars")]}
    data = prepared(tmp_path, [row], tokenizer)
    text = tokenizer.decode(data.train.batch([0])["input_ids"][0].tolist())
    assert text.count("the fox?") == 1 and text.count("brief") == len(system)
    assert learned(tmp_path, row, tokenizer) == ["quick<|im_end|>"]
    texts = {"prompt": "Human: fox?\n\nAssistant:", "chosen": "Human: fox?\n\nAssistant: quick", "rejected": "x"}
    assert learned(tmp_path, texts, tokenizer) == [" quick<|endoftext|>"]
    without = {"chosen": [user("fox?"), told("quick")], "rejected": [user("fox?"), told("jars")]}
    assert learned(tmp_path, without, tokenizer) == ["quick<|im_end|>"]
    assert learned(tmp_path, {"chosen": "the fox ran", "rejected": "the fox sat"}, tokenizer) == [" ran<|endoftext|>"]


# --- meaning dropped without a word -----------------------------------------------------------------------------------


def text_of(folder: Path, row: Any, tokenizer: Any) -> str:
    return decoded(prepared(folder, [row], tokenizer), tokenizer)


def decoded(data: PreparedData, tokenizer: Any, row: int = 0) -> str:
    return tokenizer.decode(data.train.batch([row])["input_ids"][0].tolist()).replace("<|pad|>", "")


def test_tools_as_text_and_functions_reach_the_template(tmp_path: Path):
    tool = {"type": "function", "function": {"name": "lookup", "description": "d", "parameters": {"type": "object"}}}
    talk = [user("a?"), told("", tool_calls=[CALL]), RESULT, told("jars")]
    for given in (json.dumps([tool]), [tool], json.dumps(tool)):
        assert '"description": "d"' in text_of(tmp_path, {"messages": talk, "tools": given}, tokenizer_of("qwen3"))
    older = [user("a?"), told("", function_call={"name": "lookup", "arguments": '{"place": "dog"}'}),
             {"role": "function", "name": "lookup", "content": "seven"}, told("jars")]  # fmt: skip
    row = {"messages": older, "functions": [tool["function"]]}
    assert '"description": "d"' in text_of(tmp_path, row, tokenizer_of("qwen3"))
    assert "<tool_call>" in learned(tmp_path, row, "qwen3")[0]
    sharegpt = [{"from": "human", "value": "a?"}, {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "seven"}, {"from": "gpt", "value": "jars"}]  # fmt: skip
    runs = learned(tmp_path, {"conversations": sharegpt, "tools": json.dumps([tool])}, "qwen3")
    assert '<tool_call>\n{"name": "lookup", "arguments": {"place": "dog"}}' in runs[0]


@pytest.mark.parametrize("name", ["llama3", "phi3", "deepseek_r1_distill"])
def test_calls_that_a_template_ignores_are_refused(tmp_path: Path, name: str):
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: the chat template (does not write the tool call|leaves)"):
        learned(tmp_path, {"messages": [user("a?"), told("", tool_calls=[CALL])]}, name)


def test_our_own_template_writes_tools_calls_and_reasoning(tmp_path: Path):
    tools = [{"type": "function", "function": {"name": "lookup"}}]
    talk = [user("a?"), told("", tool_calls=[CALL], reasoning_content="the fox"), RESULT, told("jars")]
    call = '<tool_call>{"name": "lookup", "arguments": {"place": "dog"}}</tool_call>'
    row = {"messages": talk, "tools": tools}
    assert learned(tmp_path, row, tiny_tokenizer()) == [
        f"<think>\nthe fox\n</think>\n\n{call}<|im_end|>", "jars<|im_end|>"]  # fmt: skip
    assert "<tools>" in text_of(tmp_path, row, tiny_tokenizer())


@pytest.mark.parametrize("row", [
    {"messages": [user("<image> what?"), told("jars")], "images": ["x.png"]},
    {"text": "<image> jars", "image": "x.png"},
])  # fmt: skip
def test_media_beside_text_are_refused(tmp_path: Path, row: dict[str, Any]):
    with pytest.raises(DataError, match="holds media"):
        learned(tmp_path, row, tiny_tokenizer())


@pytest.mark.parametrize(("row", "asked", "runs"), [
    ({"instruction": "b?", "output": "jars", "history": [["a?", "quick"]]}, "a?",
     ["quick<|im_end|>", "jars<|im_end|>"]),
    ({"instruction": "b?", "context": "the dog", "response": "jars"}, "b?\n\nthe dog", ["jars<|im_end|>"]),
    ({"question": "b? ", "context": "the dog", "answer": "jars"}, "the dog\n\nb? ", ["jars<|endoftext|>"]),
    ({"problem": "b? ", "solution": "quick, so jars", "answer": "jars"}, "b? ", ["quick, so jars<|endoftext|>"]),
    ({"source": "olympiads", "problem": "b? ", "solution": "jars"}, "b? ", ["jars<|endoftext|>"]),
    ({"messages": json.dumps([user("b?"), told("jars")])}, "b?", ["jars<|im_end|>"]),
    ({"input_ids": [300, 301, 302], "labels": [-100, -100, 302]}, "", None),
    ({"input_ids": "[300, 301, 302]", "labels": "[-100, -100, 302]"}, "", None),
])  # fmt: skip
def test_columns_are_read_by_their_meaning(tmp_path: Path, row: dict[str, Any], asked: str, runs: list[str] | None):
    tokenizer = tiny_tokenizer()
    text = text_of(tmp_path, row, tokenizer)
    assert asked in text and "olympiads" not in text
    assert learned(tmp_path, row, tokenizer) == (runs or [tokenizer.decode([302])])


@pytest.mark.parametrize("cell", ["300 301 302", "[300 301 302]", 300])
def test_tokens_that_are_no_list_are_not_trained_as_text(tmp_path: Path, cell: object):
    with pytest.raises(DataError, match="should hold a list of"):
        learned(tmp_path, {"input_ids": cell}, tiny_tokenizer())


@pytest.mark.parametrize(("value", "kind"), [(["jars", "quick"], "list"), (7, "int")])
def test_a_text_that_is_none_is_told_by_its_kind(tmp_path: Path, value: object, kind: str):
    with pytest.raises(DataError, match=f"column 'text' should hold text, found {kind}"):
        learned(tmp_path, {"text": value}, tiny_tokenizer())


def test_chat_template_kwargs_reach_the_template(tmp_path: Path):
    talk = [user("a?"), told("jars")]
    for given in ({"enable_thinking": False}, json.dumps({"enable_thinking": False})):
        assert "/nothink" in text_of(
            tmp_path, {"messages": talk, "chat_template_kwargs": given}, tokenizer_of("glm4moe")
        )


def test_what_is_not_used_is_named_with_a_count(tmp_path: Path):
    rows = [
        {"messages": [user("a?"), told("quick", reasoning_content="the fox", mood="mild")], "url": "u", "id": None},
        {"messages": [user("a?"), told("quick")], "url": "v", "chat_template_kwargs": {"pace": 3}},
    ]
    said = prepared(tmp_path, rows, tokenizer_of("deepseek_r1_distill")).summary.lines()
    for line in (
        "columns that are not used: 'url' (2 rows)",
        "reasoning of the last answer is not written by the chat template (1 row)",
        "message key 'mood' is not read by the chat template (1 row)",
        "chat_template_kwargs key 'pace' is not read by the chat template (1 row)",
    ):
        assert line in said, said


def test_a_text_with_its_own_begin_and_end_gets_no_second_one(tmp_path: Path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    bos = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[bos])
    tokenizer.bos_token = "<|im_start|>"
    whole = "<|im_start|>the fox<|endoftext|>"
    assert text_of(tmp_path, {"text": whole}, tokenizer) == whole
    assert text_of(tmp_path, {"text": "the fox"}, tokenizer) == whole
    assert text_of(tmp_path, {"prompt": "<|im_start|>the", "completion": " fox<|endoftext|>"}, tokenizer) == whole
    assert learned(tmp_path, {"prompt": "the", "completion": " fox<|endoftext|>"}, tokenizer) == [" fox<|endoftext|>"]


def test_a_large_file_rewritten_with_its_old_time_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outcore.data.sources.source.HASHED_UP_TO_BYTES", 0)
    tokenizer = tiny_tokenizer()
    assert text_of(tmp_path, {"text": "the fox"}, tokenizer) == "the fox<|endoftext|>"
    stat = (tmp_path / "rows.jsonl").stat()
    (tmp_path / "rows.jsonl").write_text('{"text": "the dog"}\n')
    os.utime(tmp_path / "rows.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (tmp_path / "rows.jsonl").stat().st_size == stat.st_size
    again = prepare_data(
        DataSettings(dataset=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"), seq_length=2048,
                     packing="off", eval_fraction=0), tokenizer)  # fmt: skip
    assert decoded(again, tokenizer) == "the dog<|endoftext|>"


def test_messages_as_python_writes_them_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="as JSON: Python's own way"):
        learned(tmp_path, {"messages": str([user("a?"), told("jars")])}, tiny_tokenizer())


def test_a_file_with_every_kind_of_bad_row_is_finished_and_counted(tmp_path: Path):
    good = {"messages": [user("a?"), told("jars")]}
    bad: list[Any] = [
        "{not json", "[1, 2]", {"messages": []}, {"messages": "hi"}, {"text": "x"},
        {"messages": [{"role": "robot", "content": "x"}]}, {"messages": [user("only asked")]},
        {"messages": [user("a?"), told("half \ud800 of a pair")]}, {"messages": [user("x"), user("y"), told("z")]},
        {"messages": [user("a?"), told("", tool_calls=[CALL])]}, {"messages": [user("a?"), told("x", weight=0.5)]},
        {"messages": [user("a?"), told("x")], "images": ["x.png"]}, {"messages": [user("a?"), told("x")], "tools": "{"},
        {"messages": [user("a?"), {"role": "assistant"}]}, {"messages": [user("a?"), told([{"type": "image"}])]},
    ]  # fmt: skip
    data = prepared(tmp_path, [good, *bad, good], tokenizer_of("gemma"), on_bad_row="skip")
    assert (data.summary.bad_rows, data.summary.documents) == (len(bad), 2)
    with pytest.raises(DataError, match=r"rows.jsonl, line 2: a text contains half of a surrogate pair"):
        prepared(tmp_path, [{"text": "fine"}, {"text": "half \ud800"}], tiny_tokenizer())
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: a text contains half of a surrogate pair"):
        prepared(tmp_path, [{"prompt": "half \ud800", "completion": "x"}], tiny_tokenizer())


def test_tool_arguments_as_objects_or_text_whatever_the_template_wants(tmp_path: Path):
    as_text = {**CALL, "function": {"name": "lookup", "arguments": '{"place": "dog"}'}}
    for name in ("deepseekv3", "qwen3", "llama3_1", "gemma4_v5", "glm4moe"):
        both = [learned(tmp_path, {"messages": [user("a?"), told("", tool_calls=[call])]}, name)
                for call in (CALL, as_text)]  # fmt: skip
        assert both[0] == both[1] and "dog" in both[0][0], name


def test_objects_over_several_lines_and_an_array_in_a_jsonl_file(tmp_path: Path):
    rows = [{"text": "the fox"}, {"text": "a dog"}, {"text": "seven jars"}]
    for content in ("\n".join(json.dumps(row, indent=2) for row in rows), json.dumps(rows, indent=1), json.dumps(rows)):
        (tmp_path / "rows.jsonl").write_text(content)
        settings = DataSettings(dataset=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path), eval_fraction=0)
        assert prepare_data(settings, tiny_tokenizer()).summary.documents == 3


def test_nulls_that_parquet_fills_in_are_not_trained(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    def row(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "lookup", "arguments": arguments}}
        return {"messages": [user("a?"), told("", tool_calls=[call])]}

    table = pyarrow.Table.from_pylist([row({"place": "dog"}), row({"size": 3})])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    settings = DataSettings(
        dataset=str(tmp_path / "x.parquet"), cache_dir=str(tmp_path), eval_fraction=0, packing="off"
    )
    tokenizer = tokenizer_of("qwen3")
    data = prepare_data(settings, tokenizer)
    texts = [decoded(data, tokenizer, row) for row in range(2)]
    assert '"arguments": {"place": "dog"}' in texts[0] and '"arguments": {"size": 3}' in texts[1]


def test_only_the_last_turn_on_request(tmp_path: Path):
    talk = [user("a?"), told("quick"), user("b?"), told("jars")]
    assert learned(tmp_path, {"messages": talk}, tiny_tokenizer(), train_on_last_turn=True) == ["jars<|im_end|>"]
