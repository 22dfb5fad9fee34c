"""The console command: runs by name or folder, listed, exported and deleted; training through it."""

import json
from pathlib import Path

import pytest

from outcore.cli import main
from outcore.runs import RunLock
from tests.train.jobs import fixtures, flags, same, weights

corpus, shared, straight, straight_by, in_the_repository = fixtures


def test_runs_are_listed_and_deleted_after_a_question(tmp_path, corpus, monkeypatch, capsys):
    argv = flags(tmp_path, corpus, "--run_name", "mine", "--max_steps", "2", "--eval_steps", "0", "--no_export")
    assert main(["train", *argv]) == 0
    folders = [f"--{name}_dir={tmp_path / name}" for name in ("checkpoint", "log", "export")]
    capsys.readouterr()
    assert main(["runs", *folders]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:3] == ["mine", "finished", "2/2"] and row[-1] == "MB"
    lock = RunLock.take("mine", [tmp_path / "checkpoint"])
    assert main(["runs", *folders]) == 0 and "running (process " in capsys.readouterr().out
    assert main(["runs", "delete", "mine", "--yes", *folders]) == 2
    assert "is being written by process" in capsys.readouterr().err
    lock.release()
    (tmp_path / "log/evaluations").mkdir()  # the journals of evaluations, which are no run
    assert main(["runs", "delete", "other", *folders]) == 2 and "Runs here: mine" in capsys.readouterr().err
    assert main(["runs", "delete", "mine", *folders]) == 2 and "add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, is_there in (("", True), ("y", False)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert main(["runs", "delete", "mine", *folders]) == 0
        assert (tmp_path / "checkpoint/mine").exists() == (tmp_path / "log/mine").exists() == is_there
    assert main(["runs", *folders]) == 0 and "no runs here" in capsys.readouterr().out


def test_a_run_is_exported_by_name_or_folder_the_best_first(tmp_path, straight, monkeypatch, capsys):
    root = f"--checkpoint_dir={straight / 'checkpoint'}"
    assert main(["export", "r", root, "--out", str(tmp_path / "a")]) == 0
    assert main(["export", str(straight / "checkpoint/r"), "--out", str(tmp_path / "b")]) == 0
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b")) and same(
        weights(tmp_path / "a"), weights(straight / "export/r")
    )
    assert main(["export", "r", root, "--merge", "--out", str(tmp_path / "c")]) == 2
    assert "nothing is to merge" in capsys.readouterr().err
    assert main(["export", "s", root]) == 2 and "Runs in" in capsys.readouterr().err
    monkeypatch.chdir(straight)
    for run in ("r", "log/r", "checkpoint/r"):
        assert main(["watch", run, "--logs", "log"]) == 0 and "r" in capsys.readouterr().out


def test_a_run_is_opened_by_name_or_folder(straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`evaluate`, `generate`, `chat`, `score` and `serve` find its finished model, else its newest checkpoint."""
    from outcore.infer.opening.model import find_place

    for name in ("final_model", "checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "final_model/done").symlink_to(straight / "export/r")
    (tmp_path / "checkpoints/stopped").symlink_to(straight / "checkpoint/r")
    monkeypatch.chdir(tmp_path)
    assert find_place("done").weights == find_place("final_model/done").weights == "final_model/done"
    for name in ("stopped", "checkpoints/stopped"):
        found = find_place(name).checkpoint
        assert found is not None and found.name == "step-00000006"


def test_an_adapter_is_merged_into_its_base_from_any_folder(tmp_path, corpus, straight, monkeypatch):
    """The base was named by a relative path; the merged model is the one that the run itself exports."""
    monkeypatch.chdir(straight / "export")
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "2", "--eval_steps", "0", "--lora_r", "4")
    argv += ["--model_name_or_path", "r", "--precision", "fp32", "--lr", "1e-2"]
    assert main(["train", *argv]) == 0, "deepspeed_config.json is found from another folder"
    monkeypatch.chdir(tmp_path)
    assert main(["export", "r", "--checkpoint_dir=checkpoint", "--merge", "--out", "merged"]) == 0
    whole, merged = weights(tmp_path / "export/r"), weights(tmp_path / "merged")
    types = {name: value.dtype for name, value in weights(straight / "export/r").items()}
    for folder, exported in (("export/r", whole), ("merged", merged)):
        assert {name: value.dtype for name, value in exported.items()} == types, "the base's, though trained in fp32"
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == "bfloat16"
    for name, value in whole.items():
        assert (value.float() - merged[name].float()).abs().max() < 0.02 * value.float().abs().max(), name
    from peft import AutoPeftModelForCausalLM

    assert main(["export", "r", "--checkpoint_dir=checkpoint", "--adapter", "--out", "adapter"]) == 0
    monkeypatch.chdir("/")
    AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


@pytest.mark.more
def test_a_packed_base_is_resumed_packed_and_its_merge_says_what_it_is(tmp_path, corpus, straight, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common = ("--run_name", "r", "--eval_steps", "0", "--lora_r", "4", "--precision", "fp32")
    argv = [*flags(tmp_path, corpus, *common), "--model_name_or_path", str(straight / "export/r")]
    assert main(["train", *argv, "--max_steps", "2", "--quantize", "nf4"]) == 0
    assert main(["export", "r", "--checkpoint_dir=checkpoint", "--merge", "--out", "merged"]) == 0
    said = capsys.readouterr().out
    assert "trained over a base in nf4 and is merged into the base as published" in said
    assert "what the run itself merges at its end (--lora_export merged) has" in said
    resumed = [*argv, "--max_steps", "2", "--resume_from_checkpoint", "auto"]
    assert main(["train", *resumed]) == 1
    assert "quantize 'nf4', this run has 'none'" in capsys.readouterr().err
