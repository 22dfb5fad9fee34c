"""The zoo of architectures: its table is what the results say, `outcore models` prints it, and it still holds."""

import json
import sys
from pathlib import Path

import pytest

from outcore.cli import main as outcore

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "zoo"))

import zoo_run as run  # pyright: ignore[reportMissingImports]
import zoo_table as table  # pyright: ignore[reportMissingImports]
from zoo_pictures import try_pictures  # pyright: ignore[reportMissingImports]

FIELDS = {
    "packing": "", "lora": "", "tiles": "model.layers.0.mixer.conv1d.weight does not fit on the device", "bf16": "",
    "bf16_trained": "several types", "steps": "", "export": "",
}  # fmt: skip


def test_table_and_packaged_copy_are_what_the_results_say():
    assert table.main(["--check"]) == 0
    records = json.loads(run.RESULTS.read_text())
    assert len(records) > 150 and not [name for name, record in records.items() if run.is_bad(record)]


def test_image_text_architectures_of_every_kind_train_and_answer_equal():
    records = {n: r for n, r in json.loads(run.RESULTS.read_text()).items() if n.startswith(run.PICTURES)}
    equal = [n for n, r in records.items() if r.get("streams") == "" and not r["steps"] and not r["answer"]]
    assert len(records) >= 97 and len(equal) >= 46 and table.SEEN in table.DOCS.read_text()


@pytest.mark.more(after=3)
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "idefics3", "llava_next", "qwen2_5_vl", "mistral3", "lfm2_vl"])
def test_a_model_that_sees_trains_and_answers_as_the_plain_one(name):
    record = run.in_child(name, try_pictures)
    assert record["streams"] == record["steps"] == record["answer"] == "" and record["lists"] >= 2


def test_a_row_says_in_few_words_what_was_found():
    row = table.row({"streams": "", **FIELDS})
    assert row["tiles"] == "no: `mixer.conv1d.weight`" and row["types"] == "32 bits; from scratch 16, too"
    assert table.row({"streams": "two stacks"}) == {"streams": "no", "why": "two stacks"}
    assert run.is_bad({"steps": "WRONG: losses off"}) and run.is_bad({"crash": "x"}) and not run.is_bad(FIELDS)


def test_the_command_prints_the_table_one_row_and_a_near_name(capsys):
    assert outcore(["models"]) == 0
    assert "mixtral" in capsys.readouterr().out
    assert outcore(["models", "llama", "hy_v4"]) == 0
    out = capsys.readouterr().out
    assert "packed rows: yes" in out and "prev_topk_indices" in out and "DeepSpeed's engine" in out
    assert outcore(["models", "lama"]) == 2
    assert "'llama'" in capsys.readouterr().err
    assert outcore(["models", "llama", "--try"]) == 0
    assert "streams: yes" in capsys.readouterr().out


@pytest.mark.slow
def test_every_architecture_of_transformers_streams_equal_or_is_refused_in_words(tmp_path):
    assert run.main(["--all", "--out", str(tmp_path / "zoo.json")]) == 0


@pytest.mark.slow
def test_every_image_text_architecture_trains_equal_or_is_left_out_in_words(tmp_path):
    assert run.main(["--all", "--pictures", "--out", str(tmp_path / "zoo.json")]) == 0
