"""The judges of the exactness benchmarks (`stream_exact.py`, `moments8.py`): what passes, and what does not."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "exactness"))

import moments8  # pyright: ignore[reportMissingImports]
from stream_exact import Step, judge  # pyright: ignore[reportMissingImports]


def steps(losses, skipped=(), scales=None):
    return [Step(loss, 1.0, i in skipped, scales[i] if scales else 1.0) for i, loss in enumerate(losses)]


FP16 = {"losses": [4.0, 4.0, 3.9, 3.8, 3.7, 3.7, 3.6], "skipped": (0, 4), "scales": [8, 4, 4, 8, 8, 4, 4]}


def test_same_training_passes():
    assert judge("bf16", steps([4, 3]), steps([4.01, 3.01]), (5, 4), 0.005)["failures"] == []
    assert judge("fp16", steps(**FP16), steps(**FP16), (5, 4), 0.005)["failures"] == []


@pytest.mark.parametrize(("kind", "plain", "stream", "held_out", "words"), [
    ("bf16", {"losses": [4, 3]}, {"losses": [4, 3.02]}, (5, 4), "differs by 0.667% at step 1"),
    ("bf16", {"losses": [4, 3]}, {"losses": [4, float("nan")]}, (5, 4), "differs by"),
    ("bf16", {"losses": [4, 3]}, {"losses": [4, 3]}, (5, 5), "has not fallen"),
    ("bf16", {"losses": [4, 3]}, {"losses": [4, 3]}, (5, float("nan")), "has not fallen"),
    ("lora", {"losses": [4, 3], "skipped": (1,)}, {"losses": [4, 3], "skipped": (1,)}, (5, 4), "were skipped"),
    ("fp16", FP16, {**FP16, "skipped": (0, 5)}, (5, 4), "other steps were skipped"),
    ("fp16", FP16, {**FP16, "skipped": ()}, (5, 4), "nothing was tried"),
    ("fp16", FP16, {**FP16, "scales": [8] * 7}, (5, 4), "never fell"),
    ("fp16", FP16, {**FP16, "scales": [8, 4, 4, 4, 4, 2, 2]}, (5, 4), "never rose"),
    ("fp16", FP16, {**FP16, "skipped": (0, 1)}, (5, 4), "no overflow came after good steps"),
])  # fmt: skip
def test_other_training_is_told(kind, plain, stream, held_out, words):
    failures = judge(kind, steps(**plain), steps(**stream), held_out, 0.005)["failures"]
    assert any(words in failure for failure in failures), failures


def result(folder, name, last, *, state_format=None, seed=1, **changes):
    found = {
        "name": name, "format": state_format or name, "seed": seed, "shape": "100m", "steps": 200, "seq_length": 512,
        "rows": 8, "accumulation": 1, "lr": 6e-4, "eval_every": 100, "text": {"source": "text"}, "epochs": 1.5,
        "tokens_per_step": 4096, "device": "a GPU", "last_train_loss": last - 0.1, "last_validation_loss": last,
        "validation": [{"step": 100, "loss": last + 1}, {"step": 200, "loss": last}],
    }  # fmt: skip
    (folder / f"{name}-seed{seed}.json").write_text(json.dumps(found | changes))


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("last", "code"), [(2.008, 0), (1.992, 0), (2.012, 1), (1.98, 1), (float("nan"), 1)])
def test_formats_are_compared_with_fp32_of_the_same_seed(tmp_path, capsys, last, code):
    result(tmp_path, "fp32", 2.0)
    result(tmp_path, "fp32-again", 2.001, state_format="fp32")
    result(tmp_path, "split8", last)
    result(tmp_path, "fp32", 3.0, seed=2)
    result(tmp_path, "split8", 3.0, seed=2)
    picture, table = tmp_path / "curve.png", tmp_path / "doc.md"
    begin, end = moments8.MARKERS
    table.write_text(f"Before.\n{begin}\n| old | row |\n{end}\nAfter.\n")
    assert moments8.main(["--plot", str(picture), "--table", str(table), "--out", str(tmp_path)]) == code
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = [line.split(" | ") for line in table.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip("| ") for row in rows] == ["fp32", "fp32-again", "split8", "fp32", "split8"]
    assert table.read_text().startswith(f"Before.\n{begin}\n") and table.read_text().endswith(f"{end}\nAfter.\n")
    assert "old" not in table.read_text() and "pictures/moments8.png" in table.read_text()
    assert rows[1][-1].startswith("+0.05%") and ("not within" in capsys.readouterr().out) is bool(code)


def test_runs_that_cannot_be_compared_are_refused(tmp_path, capsys):
    assert moments8.main(["--compare", "--out", str(tmp_path)]) == 1
    result(tmp_path, "split8", 2.0)
    assert moments8.main(["--compare", "--out", str(tmp_path)]) == 1
    result(tmp_path, "fp32", 2.0, lr=1e-3)
    assert moments8.main(["--compare", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "no results" in said and "no fp32 run of seed 1" in said and "lr is 0.0006" in said
    (tmp_path / "fp32-seed1.json").unlink()
    result(tmp_path, "fp32", 2.0)
    (tmp_path / "doc.md").write_text("no markers")
    with pytest.raises(ValueError, match="no place for the table"):
        moments8.main(["--table", str(tmp_path / "doc.md"), "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        moments8.main(["--out", str(tmp_path)])
