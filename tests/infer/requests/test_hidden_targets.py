"""`outcore score --top_k`: what the model says, at the tokens that training trains, noted document by document."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet

from outcore import cli
from outcore.infer.commands import journal as journals
from tests.infer.test_commands import SMALL

ROWS = [{"text": "The quick brown fox"}, {"prompt": "lazy", "completion": " dog jumps"}, {"text": "dog"}]
ROWS += [{"messages": [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog over"}]}]


def score(folder: Path, output: str = "out.parquet", *flags: str) -> int:
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    given = ["score", str(folder), *SMALL, "--input", "rows.jsonl", "--top_k", "5", "--output", output]
    return cli.main([*given, *flags])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_targets_are_what_the_model_says(tiny_folder: Any) -> None:
    folder, model, tokenizer = tiny_folder
    assert score(folder) == 0
    rows = parquet.read_table("out.parquet").to_pylist()
    assert len(rows) == len(ROWS) and not Path("out.parquet.journal").exists()
    assert rows[0]["tokens"] == [*tokenizer("The quick brown fox")["input_ids"], tokenizer.eos_token_id]
    assert rows[1]["has_loss"][0] is False and rows[1]["has_loss"][-1] is True
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["tokens"]])).logits[0].float()
        mask = np.array(row["has_loss"][1:])
        logprobs_NV = logits.log_softmax(-1)[:-1][torch.from_numpy(mask)]
        own = logprobs_NV.gather(-1, torch.tensor(row["tokens"][1:])[torch.from_numpy(mask)][:, None])[:, 0]
        values, ids = logprobs_NV.topk(5)
        assert np.array(row["top_ids"]).reshape(-1, 5).tolist() == ids.tolist()
        np.testing.assert_allclose(np.array(row["top_logprobs"]).reshape(-1, 5), values, atol=1e-4)
        np.testing.assert_allclose(row["logprobs"], own, atol=1e-4)


def test_a_stop_loses_and_doubles_no_document(tiny_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, noted = tiny_folder[0], []
    assert score(folder, "whole.parquet") == 0
    add = journals.Journal.add

    def stops(self: Any, number: int, result: dict[str, Any]) -> None:
        if len(noted) == 2:
            raise OSError(28, "No space left on device")
        noted.append(number)
        add(self, number, result)

    monkeypatch.setattr(journals.Journal, "add", stops)
    assert score(folder) == 1
    assert not Path("out.parquet").exists()
    data = Path("out.parquet.journal").read_bytes()
    Path("out.parquet.journal").write_bytes(data[:-9])  # a line torn by a power cut
    again: list[int] = []
    monkeypatch.setattr(
        journals.Journal, "add", lambda self, number, result: (again.append(number), add(self, number, result))[1]
    )
    assert score(folder) == 0
    assert noted == [0, 1] and again == [1, 2, 3]
    assert Path("out.parquet").read_bytes() == Path("whole.parquet").read_bytes()


def test_a_journal_of_another_question_is_refused(
    tiny_folder: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(
        "outcore.infer.commands.hidden_targets.write_targets", lambda *_: (_ for _ in ()).throw(OSError())
    )
    assert score(tiny_folder[0]) == 1
    assert score(tiny_folder[0], "out.parquet", "--top_k", "3") == 2
    assert "top_k differs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--top_k", "0"], "from 1 to 1024"),
        (["--top_k", "2000"], "from 1 to 1024"),
        (["--output", "out.jsonl"], "--output FILE.parquet"),
        (["--token_logprobs"], "has each token's own"),
    ],
)
def test_flags_that_cannot_be_are_refused(tiny_folder: Any, flags: list[str], words: str, capsys: Any) -> None:
    assert score(tiny_folder[0], "out.parquet", *flags) == 2
    assert words in capsys.readouterr().err
