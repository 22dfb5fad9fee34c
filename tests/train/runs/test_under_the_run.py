"""What is damaged or taken away under a run that goes on: found where it matters, and never passed over."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from outcore.cli import main
from outcore.train.loop import TrainingLoop
from tests.infer.models import save_tiny_model
from tests.train.jobs import fixtures, flags, metrics, same, states, weights

corpus, shared, straight, straight_by, in_the_repository = fixtures


def argv(root: Path, data: Path, *extra: str) -> list[str]:
    common = ["--run_name", "r", "--eval_steps", "0", "--precision", "fp32"]
    return ["train", *flags(root, data, *common, *extra), f"--data_cache_dir={root / 'cache'}"]


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Have something happen once, when a step is over."""

    def happens(step: int, what: Callable[[], object]) -> None:
        real, todo = TrainingLoop.train_one, [what]

        def counted(self: TrainingLoop, batches: object) -> object:
            result = real(self, batches)  # type: ignore[arg-type]
            if self.step == step and todo:
                todo.pop()()
            return result

        monkeypatch.setattr(TrainingLoop, "train_one", counted)

    return happens


def damage(root: Path, how: str) -> None:
    """Spoil the whole file, so that the next row meets it, or cut nearly all of it off."""
    (file,) = (root / "cache").glob("tokens-*/tokens.bin")
    if how == "cut":
        return os.truncate(file, 100)
    with open(file, "r+b") as opened:
        for start in range(0, file.stat().st_size, 16 << 10):
            opened.seek(start + 1000)
            opened.write(bytes(64))


@pytest.mark.parametrize("how", ["zeroed", "cut"])
def test_damage_in_the_token_cache_ends_the_run_with_words(
    tmp_path: Path, corpus: Path, after, how: str, capsys
) -> None:
    """It trained on the zeros, or died by SIGBUS. What was saved goes on, bit for bit."""
    common = ["--max_steps", "6", "--save_steps", "2", "--no_export"]
    assert main(argv(tmp_path / "whole", corpus, *common)) == 0
    after(3, lambda: damage(tmp_path, how))
    assert main(argv(tmp_path, corpus, *common)) == 1
    said = capsys.readouterr().err
    assert re.search(r"tokens\.bin: bytes [\d,]+ and on have changed since\. Checkpoints are whole", said)
    assert "Traceback" not in said
    (folder,) = (tmp_path / "cache").glob("tokens-*[!k]")
    shutil.rmtree(folder)
    assert main([*argv(tmp_path, corpus, *common), "--resume_from_checkpoint", "auto"]) == 0
    step = "checkpoint/r/step-00000006"
    assert same(states(tmp_path / step), states(tmp_path / "whole" / step))


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_log_that_is_taken_away_is_there_in_the_end(
    tmp_path: Path, corpus: Path, after, how: str, step: int, capsys
) -> None:
    logs = tmp_path / "log/r"

    def take_away() -> None:
        if how == "moved":
            logs.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(logs)
        if how == "replaced":
            logs.mkdir()
            (logs / "metrics.jsonl").write_text('{"somebody": "else"}\n')

    after(step, take_away)
    assert main(argv(tmp_path, corpus, "--max_steps", "4", "--save_strategy", "no", "--no_export")) == 0
    assert [line.get("step") for line in metrics(tmp_path) if "event" not in line] == [1, 2, 3, 4]
    said = capsys.readouterr().out
    assert said.count("was removed or replaced while the run writes it: every line of it is there again") == 1
    assert (logs / "metrics.1.jsonl").exists() == (how == "replaced")


def test_an_adapter_without_a_checkpoint_is_merged_afterwards(
    tmp_path: Path, corpus: Path, monkeypatch, capsys
) -> None:
    base = tmp_path / "base"
    save_tiny_model(base)
    common = ["--model_name_or_path", str(base), "--lora_r", "4", "--max_steps", "2", "--lr", "1e-2"]
    assert main(argv(tmp_path / "whole", corpus, *common)) == 0
    assert main(argv(tmp_path, corpus, *common, "--save_strategy", "no", "--lora_export", "adapter")) == 0
    (tmp_path / "export").rename(tmp_path / "final_model")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["export", "r", "--merge"]) == 0
    assert "the adapter final_model/r, merged: final_model/r-merged" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "final_model/r"), "--merge", "--out", "again"]) == 0
    expected = weights(tmp_path / "whole/export/r")
    for folder in ("final_model/r-merged", "again"):
        merged = weights(tmp_path / folder)
        assert merged.keys() == expected.keys()
        assert all((merged[name] - value).abs().max() < 1e-5 for name, value in expected.items())
    assert main(["export", "r", "--merge"]) == 2 and "exists already" in capsys.readouterr().err
    adapter = tmp_path / "final_model/r/adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-4] + b"\1\1\1\1")
    assert main(["export", "r", "--merge", "--out", "third"]) == 1
    assert "its checksum is wrong" in capsys.readouterr().err and not (tmp_path / "third").exists()
