"""Several sources mixed by weight: through the command line and YAML, the same every time, exactly resumable."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from outcore.data import BatchStream, DataError, DataSettings, load_or_train_tokenizer, prepare_mixture, weighted_source
from outcore.data.layout import MixedRows
from outcore.runs import default_name
from outcore.train.configure import parse_config
from outcore.train.run import main
from tests.refused import refused
from tests.train.jobs import fixtures, flags, metrics, same, states

corpus, shared, straight, straight_by, in_the_repository = fixtures


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats as jsonl, questions as csv, and a text."""
    folder = tmp_path_factory.mktemp("sources")
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n}?"},
                {"role": "assistant", "content": f"It is {n * n}."},
            ]
        }
        for n in range(40)
    ]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(chat) for chat in chats))
    rows = "\n".join(f"Say {n},Certainly: {n}!" for n in range(60))
    (folder / "qa.csv").write_text(f"prompt,completion\n{rows}\n")
    (folder / "notes.txt").write_text("\n\n".join(f"Note {n} is about the number {n}." for n in range(50)))
    return folder


def test_rows_of_each_source_by_its_weight(sources: Path, tmp_path: Path) -> None:
    settings = DataSettings(seq_length=32, cache_dir=str(tmp_path), dataset=str(sources / "notes.txt"), packing="off")
    tokenizer = load_or_train_tokenizer(settings)
    said: list[str] = []
    names = [weighted_source(str(sources / name)) for name in ("chats.jsonl", "qa.csv:0.5", "notes.txt:2")]
    data = prepare_mixture(settings, names, tokenizer, said.append, packing_allowed=False)
    rows = data.train
    assert isinstance(rows, MixedRows)
    chats, questions, notes = (len(part) for part in rows.parts)
    assert rows.taken == (chats, round(questions / 2), 2 * notes) and len(rows) == sum(rows.taken)
    seen = Counter(tuple(rows.documents_of(row)[0].tolist()) for row in range(len(rows)))
    counts = Counter(seen.values())
    assert counts[2] == notes and counts[1] == chats + round(questions / 2), "no row of qa.csv twice"
    assert "mixed: " in data.summary.notes[0] and "qa.csv:0.5 " in data.summary.notes[0]
    assert data.eval is not None and len(data.eval) == sum(1 for _ in range(len(data.eval)))
    stream, again = BatchStream(rows, 3), BatchStream(rows, 3)
    batches = [next(stream) for _ in range(5)]
    again.load_state_dict({**stream.state_dict(), "rows_seen": 6})
    assert all(np.array_equal(next(again)["input_ids"], batches[n]["input_ids"]) for n in (2, 3, 4))
    other = MixedRows(rows.parts, (1.0, 0.5, 1.0), rows.seed)
    refused(DataError, "cannot be restored", lambda: BatchStream(other, 3).load_state_dict(stream.state_dict()))


def test_what_a_source_may_be_called(tmp_path: Path) -> None:
    odd = tmp_path / "a:0.3"
    odd.write_text("x")
    assert weighted_source(str(odd)).name == str(odd) and weighted_source("qa.csv:.3").weight == 0.3
    assert weighted_source("org/data").weight == 1 and weighted_source("x:2").name == "x"
    refused(DataError, "above 0", lambda: weighted_source("x:0"))
    file = tmp_path / "run.yaml"
    file.write_text("dataset: [a.jsonl, 'qa.csv:0.3']\n")
    config = parse_config(["--config", str(file)])
    assert config.dataset == ("a.jsonl", "qa.csv:0.3") and default_name(config) == "tiny-a-qa"
    assert parse_config(["--dataset", "a", "--dataset", "b"]).dataset == ("a", "b")


def test_a_mixture_trains_and_resumes_exactly(tmp_path, sources, corpus, capsys):
    common = ["--run_name", "r", "--max_steps", "4", "--save_steps", "2", "--eval_steps", "2", "--precision", "fp32"]
    common += ["--dataset", f"{sources / 'qa.csv'}:0.5", "--sample_steps", "2", "--no_export"]
    assert main(flags(tmp_path / "one", sources / "chats.jsonl", *common)) == 0
    out = capsys.readouterr()
    assert "mixed: " in out.out and "% of the tokens" in out.out
    step = tmp_path / "one/checkpoint/r/step-00000002"
    assert (
        main([*flags(tmp_path / "two", sources / "chats.jsonl", *common), "--resume_from_checkpoint", str(step)]) == 0
    )
    last = "checkpoint/r/step-00000004"
    assert same(states(tmp_path / "one" / last), states(tmp_path / "two" / last))
    sample = (tmp_path / "one/log/r/samples.txt").read_text()
    assert "What is" in sample and ">>>" in sample, "a prompt of the data, through the chat template"
    record = next(line for line in metrics(tmp_path / "one") if line.get("step") == 1 and "event" not in line)
    assert record["step_tokens"] == 4 * 32 > record["loss_tokens"]
    assert record["tokens_per_s"] == pytest.approx(record["step_tokens"] / record["step_s"])
