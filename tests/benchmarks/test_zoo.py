"""The zoo of architectures: its table is what the results say, `outcore models` prints it, and it still holds."""

import json
import sys
from pathlib import Path

import pytest

from outcore.cli import main as outcore

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "zoo"))

import zoo_run as run  # pyright: ignore[reportMissingImports]
import zoo_table as table  # pyright: ignore[reportMissingImports]

FIELDS = {
    "packing": "", "lora": "", "tiles": "model.layers.0.mixer.conv1d.weight does not fit on the device", "bf16": "",
    "bf16_trained": "several types", "steps": "", "export": "",
}  # fmt: skip


def test_table_and_packaged_copy_are_what_the_results_say():
    assert table.main(["--check"]) == 0
    records = json.loads(run.RESULTS.read_text())
    assert len(records) > 150 and not [name for name, record in records.items() if run.is_bad(record)]


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
