"""A folder with a file of every shape: read together, each by its own shape, and trained for two epochs on the CPU."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from outcore.data import DataError, DataSettings, PreparedData, prepare_data
from outcore.train.run import main
from tests.data.fixtures import sentence, tiny_tokenizer, write_jsonl
from tests.data.generated import TOOLS, conversations, words


def every_shape(folder: Path, each: int = 4) -> None:
    """Files of rows of all shapes."""
    rng = random.Random(5)
    talks = [{"messages": talk, "tools": tools} for kind, talk, tools in conversations(seed=5) if kind != "UE"]
    asked = [{"role": "user", "content": "the fox?"}]
    told = {"role": "assistant", "content": "jumps"}
    files: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": sentence(n, 60)} for n in range(each)],
        "messages": talks,
        "sharegpt": [{"conversations": [{"from": m["role"], "value": m["content"]} for m in row["messages"]]}
                     for row in talks if row["tools"] is None],
        "texts of tools": [{"messages": json.dumps(row["messages"]), "tools": json.dumps(TOOLS)} for row in talks[:9]],
        "alpaca": [{"instruction": words(rng), "input": words(rng), "output": sentence(n)} for n in range(each)],
        "dolly": [{"instruction": words(rng), "context": words(rng), "response": sentence(n)} for n in range(each)],
        "pairs": [{"prompt": words(rng), "completion": sentence(n)} for n in range(each)],
        "answers": [{"question": words(rng), "context": words(rng), "answer": sentence(n)} for n in range(each)],
        "math": [{"problem": words(rng), "solution": sentence(n), "answer": "7"} for n in range(each)],
        "message pairs": [{"prompt": asked, "completion": [told]}],
        "preference": [{"chosen": [*asked, told], "rejected": [*asked, {**told, "content": "sleeps"}]}],
        "tokens": [{"input_ids": [300, 301, 302, 303], "labels": [-100, -100, 302, 303]}],
    }  # fmt: skip
    for name, rows in files.items():
        write_jsonl(folder / f"{name}.jsonl", rows)


def prepared(folder: Path, **settings: Any) -> PreparedData:
    chosen = {"seq_length": 64, "eval_fraction": 0.0, **settings}
    return prepare_data(DataSettings(str(folder), cache_dir=str(folder.parent / "cache"), **chosen), tiny_tokenizer())


@pytest.mark.more
def test_files_of_every_shape_train_two_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "data").mkdir()
    every_shape(tmp_path / "data")
    tiny_tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    folders = [f"--{name}_dir={tmp_path / name}" for name in ("checkpoint", "log", "export", "data_cache")]
    flags = ["--dataset", str(tmp_path / "data"), "--tokenizer_name_or_path", str(tmp_path / "tokenizer"), *folders]
    flags += ["--seq_length", "64", "--num_train_epochs", "2", "--engine", "stream", "--report_to", "none"]
    flags += ["--sample_steps", "0", "--learning_rate", "0.01", "--run_name", "mixture", "--eval_fraction", "0"]
    flags += ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--save_steps", "0"]
    assert main(flags) == 0
    lines = [json.loads(line) for line in (tmp_path / "log/mixture/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    half = len(losses) // 2
    assert len(losses) >= 8 and sum(losses[half:]) / (len(losses) - half) < sum(losses[:half]) / half
    header = lines[0]["data"]
    assert header["bad_rows"] == 0 and len(header["shape"].split("; ")) == 10
    assert "alpaca (from instruction, output)" in header["shape"] and "tokens (from input_ids)" in header["shape"]
    said = capsys.readouterr().out
    assert "a sample of each shape of rows" in said and "⟦jumps<|im_end|>⟧" in said


def test_text_is_windowed_and_conversations_are_cut_in_one_mixture(tmp_path: Path):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "a.jsonl", [{"text": sentence(1, 400)}])
    talk = [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": sentence(2, 400)}]
    write_jsonl(tmp_path / "data" / "b.jsonl", [{"messages": talk}] * 2)
    data = prepared(tmp_path / "data", packing="off")
    windows = -(-(data.cache.offsets[1] - data.cache.offsets[0]) // 64)
    assert len(data.train) == windows + 2 and data.summary.truncated_documents == 2
    assert prepared(tmp_path / "data", packing="off", long_rows="drop").summary.dropped_documents == 2
    split = prepared(tmp_path / "data", packing="off", long_rows="split")
    assert split.summary.split_documents == 2 and split.train.total_tokens == split.summary.tokens
    with pytest.raises(DataError, match="not both in one folder"):
        prepare_data(
            DataSettings(str(tmp_path / "data"), cache_dir=str(tmp_path), eval_fraction=0.0),
            tiny_tokenizer(),
            encoder_decoder=True,
        )
