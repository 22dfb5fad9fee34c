"""Answers that are no text, or that are not there in a file's first rows: trained as what they are, or refused by line;
never a question as plain text in their place."""

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outcore.cli import main
from outcore.data import DataError, DataSettings, prepare_data
from outcore.data.cache import carries_loss, token_ids
from tests.data.fixtures import text_rows, tiny_tokenizer, write_jsonl
from tests.data.runs import runs
from tests.refused import refused

ASKED = "the quick fox jumps"
USER, NUMBER = {"role": "user", "content": ASKED}, {"role": "assistant", "content": 4}
NUMBERS: dict[str, dict[str, Any]] = {
    "prompt and completion": {"prompt": ASKED, "completion": 4},
    "question and answer": {"question": ASKED, "answer": 4},
    "problem and solution": {"problem": ASKED, "solution": 4},
    "beside text": {"text": "a lazy dog", "question": ASKED, "answer": 4},
    "instruction and output": {"instruction": ASKED, "output": 4},
    "instruction, input and response": {"instruction": ASKED, "input": 7, "response": 4},
    "messages": {"messages": [USER, NUMBER]},
    "sharegpt": {"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": 4}]},
    "pair of messages": {"prompt": [USER], "completion": [NUMBER]},
    "a question and messages": {"prompt": ASKED, "completion": [NUMBER]},
    "preference": {"chosen": [USER, NUMBER], "rejected": [USER, {"role": "assistant", "content": 5}]},
}


def settings_of(file: Path, **more: Any) -> DataSettings:
    return DataSettings(dataset=str(file), cache_dir=str(file.parent / "cache"), seq_length=128, **more)


def learned(prepared: Any, tokenizer: Any) -> list[str]:
    """Every document's trained text."""
    ends = prepared.cache.offsets
    found = []
    for start, end in pairwise(ends):
        tokens = np.asarray(prepared.cache.tokens[start:end])
        found.append("".join(runs(tokenizer, token_ids(tokens).tolist(), carries_loss(tokens).tolist())))
    return found


@pytest.mark.parametrize("value", [4, 2.5, True])
@pytest.mark.parametrize("shape", NUMBERS)
def test_numbers_and_booleans_are_trained_as_text(tmp_path: Path, shape: str, value: Any) -> None:
    text = json.dumps(NUMBERS[shape]).replace(": 4", f": {json.dumps(value)}")
    tokenizer = tiny_tokenizer()
    prepared = prepare_data(settings_of(write_jsonl(tmp_path / "a.jsonl", [text] * 20)), tokenizer)
    for trained in learned(prepared, tokenizer):
        assert trained.removesuffix("\n").removesuffix("<|im_end|>").removesuffix("<|endoftext|>") == json.dumps(value)
    said = [line for line in prepared.summary.lines() if "numbers and booleans" in line]
    assert len(said) in (1, 2) and "are written as text (20 rows)" in said[0]


ODD = {
    "a list": {"question": ASKED, "answer": ["a", "b"]},
    "an object": {"prompt": ASKED, "completion": {"text": "a"}},
    "instruction and a list": {"instruction": ASKED, "output": ["a"]},
    "nothing anywhere": {"prompt": ASKED, "completion": None},
    "talk that is none": {"messages": {"a": 1}, "title": ASKED},
    "preferences that are lists of words": {"title": ASKED, "chosen": ["a"], "rejected": ["b"]},
    "an answer by no known name": {"question": ASKED, "label": 3},
    "an instruction and a label": {"instruction": ASKED, "label": "x", "score": 1},
    "capitals": {"Question": ASKED, "Answer": 3},
}


@pytest.mark.parametrize("shape", ODD)
def test_a_question_is_never_trained_because_its_answer_is_odd(tmp_path: Path, shape: str) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [ODD[shape]] * 3)
    words = r"a\.jsonl, line 1: .* should hold|no known shape"
    refused(DataError, words, lambda: prepare_data(settings_of(file), tiny_tokenizer()))


def test_a_question_alone_is_text_where_it_is_said_or_is_all_there_is(tmp_path: Path) -> None:
    rows = [{"question": row["text"], "label": 3} for row in text_rows(20)]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    for more in ({"text_column": "question"}, {"format": "text"}):
        assert prepare_data(settings_of(file, **more), tiny_tokenizer()).summary.documents == 20
    alone = write_jsonl(tmp_path / "b.jsonl", [{"prompt": row["text"]} for row in text_rows(20)])
    assert "text (from prompt)" in prepare_data(settings_of(alone), tiny_tokenizer()).summary.shape


def test_where_a_text_comes_from_and_its_label_are_no_question_and_answer(tmp_path: Path) -> None:
    rows = [{**row, "source": "web", "target": 1, "chat": 7} for row in text_rows(20)]
    prepared = prepare_data(settings_of(write_jsonl(tmp_path / "a.jsonl", rows)), tiny_tokenizer())
    assert prepared.summary.shape == "text (from text)"
    assert prepared.summary.unused_columns == {"source": 20, "target": 20, "chat": 20}


WITHOUT, WITH = {"prompt": ASKED, "completion": None}, {"prompt": ASKED, "completion": " a lazy dog"}
LATE = {"null": WITHOUT, "no column": {"prompt": ASKED}}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows in the form that the name says; a table has nothing for a column that a row lacks."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"completion": None, **row} for row in rows]), path)
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            table = csv.DictWriter(file, ["prompt", "completion"])
            table.writeheader()
            table.writerows(rows)
    else:
        import datasets

        datasets.Dataset.from_list([{"completion": None, **row} for row in rows]).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "saved"])
@pytest.mark.parametrize("late", LATE)
def test_answers_that_come_late_are_found_whatever_the_order(tmp_path: Path, name: str, late: str) -> None:
    rows = [LATE[late]] * 30 + [WITH] * 10
    tokenizer = tiny_tokenizer()
    file = write(tmp_path / name, rows)
    refused(
        DataError,
        r"(line|row) \d+: (column 'completion'|no column)",
        lambda: prepare_data(settings_of(file), tokenizer),
    )
    prepared = prepare_data(settings_of(file, on_bad_row="skip"), tokenizer)
    assert (prepared.summary.documents, prepared.summary.bad_rows) == (10, 30)
    assert set(learned(prepared, tokenizer)) == {" a lazy dog<|endoftext|>"}
    other = prepare_data(settings_of(write(tmp_path / f"b-{name}", rows[::-1]), on_bad_row="skip"), tokenizer)
    assert other.summary.shape == prepared.summary.shape == "prompt_completion (from prompt, completion)"


def test_each_file_of_a_folder_is_looked_at_whole(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"prompt": ASKED}] * 20 + [WITH] * 5)
    write_jsonl(
        folder / "b [x].jsonl", [{"instruction": ASKED, "output": None}] * 20 + [{"instruction": ASKED, "output": 4}]
    )
    write(folder / "c.csv", [WITH] * 3)
    (folder / "d.json").write_text(
        json.dumps({"data": [{"question": ASKED}] * 20 + [{"question": ASKED, "answer": "a"}]})
    )
    settings = DataSettings(dataset=str(folder), cache_dir=str(tmp_path), on_bad_row="skip")
    summary = prepare_data(settings, tiny_tokenizer()).summary
    assert (summary.documents, summary.bad_rows) == (5 + 1 + 3 + 1, 60)
    assert "text" not in summary.shape


def test_the_command_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "good.jsonl", [{"question": ASKED, "answer": 4}] * 20)
    assert main(["data", "good.jsonl"]) == 0
    assert "numbers and booleans in column 'answer' are written as text (20 rows)" in capsys.readouterr().out
    write_jsonl(tmp_path / "bad.jsonl", [{"question": ASKED, "answer": ["x"]}] * 20)
    assert main(["data", "bad.jsonl"]) == 2
    assert "bad.jsonl, line 1: column 'answer' should hold text, found list" in capsys.readouterr().err
