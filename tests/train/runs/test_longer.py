"""Training longer on purpose, the best checkpoint, early stopping, schedules and strategies, by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outcore.checkpoint.manifest import Manifest
from outcore.config import ConfigError, DeepSpeedFile
from outcore.train.configure import parse_config
from outcore.train.configure.rooms import run_length, schedule_of
from outcore.train.loop import BestSoFar
from outcore.train.run import main
from tests.refused import refused
from tests.train.jobs import fixtures, flags, metrics, same, states, weights

corpus, shared, straight, straight_by, in_the_repository = fixtures
CONSTANT = ["--lr_scheduler_type", "constant", "--precision", "fp32"]


def _steps(root: Path, key: str) -> list[float]:
    return [line[key] for line in metrics(root) if "event" not in line]


def test_a_run_is_trained_longer_on_purpose(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a constant rate two legs equal one run bit for bit; another schedule is stated anew and in the header."""
    monkeypatch.setattr("outcore.train.loop.LATEST_STEPS", 1)  # of which "done" counts no fewer
    common = ["--run_name", "r", "--eval_steps", "0", "--no_export", *CONSTANT]
    assert main(flags(tmp_path / "one", corpus, *common, "--max_steps", "4")) == 0
    assert "done: 4 steps in " in capsys.readouterr().out
    argv = flags(tmp_path / "two", corpus, *common, "--max_steps", "2")
    assert main(argv) == 0
    assert main([*argv, "--resume_from_checkpoint", "auto"]) == 0
    out = capsys.readouterr().out
    assert "already finished: the run has all of its 2 steps" in out and "2 steps, none of them by this process" in out
    longer = [*argv, "--max_steps", "4", "--resume_from_checkpoint", "auto"]
    assert main(longer) == 1
    assert "or add --continue_with_changes" in capsys.readouterr().err
    assert main([*longer, "--continue_with_changes"]) == 0
    out = capsys.readouterr().out
    assert "resume: schedule total_steps 2 -> 4, as asked" in out and "the schedule from here on: constant" in out
    assert "done: 4 steps, 2 of them by this process in " in out
    assert f"loss {_steps(tmp_path / 'one', 'loss')[0]:.3f} -> " in out, "done tells the whole run's loss"
    step = "checkpoint/r/step-00000004"
    assert same(states(tmp_path / "two" / step), states(tmp_path / "one" / step))
    assert _steps(tmp_path / "two", "loss") == _steps(tmp_path / "one", "loss")
    more = ["--max_steps", "5", "--learning_rate", "1e-4", "--lr_scheduler_type", "cosine", "--seq_length", "16"]
    more += ["--gradient_accumulation_steps", "3", "--resume_from_checkpoint", "auto", "--continue_with_changes"]
    assert main([*argv, *more]) == 0
    out = capsys.readouterr().out
    assert "read from their beginning" in out and "schedule peak_lr" in out and "train_batch_size 4 -> 6" in out
    headers = [line["header"] for line in metrics(tmp_path / "two") if line.get("event") == "resume"]
    assert any("schedule kind constant -> cosine" in change for change in headers[-1]["changes"])
    assert main([*argv, "--precision", "bf16", "--resume_from_checkpoint", "auto", "--continue_with_changes"]) == 1
    assert "precision" in capsys.readouterr().err


@pytest.mark.more
def test_a_cosine_of_an_older_version_is_told_of_its_new_end(tmp_path, corpus, capsys):
    """Its checkpoint says nothing of the end, which was a tenth of the peak."""
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "4", "--save_steps", "2", "--eval_steps", "0")
    argv += ["--no_export", "--precision", "fp32", "--lr_scheduler_type", "cosine"]
    assert main(argv) == 0
    folder = tmp_path / "checkpoint/r/step-00000002"
    trainer = json.loads((folder / "trainer.json").read_text())
    del trainer["fingerprint"]["schedule"]["min_ratio"]
    (folder / "trainer.json").write_text(json.dumps(trainer))
    manifest = Manifest.load(folder)
    Manifest.of(folder, 2, manifest.order, {}, manifest.config_sha256).save(folder)
    told = "this checkpoint is of a version whose cosine ended at a tenth of the peak; from here on it ends at 0 of it"
    for more, is_told in ([], True), (["--min_lr_ratio", "0.1"], False):
        capsys.readouterr()
        assert main([*argv, *more, "--resume_from_checkpoint", str(folder)]) == 0
        assert (f"resume: {told}" in capsys.readouterr().out) == is_told
        header = [line["header"] for line in metrics(tmp_path) if line.get("event") == "resume"][-1]
        assert any(change.startswith(told) for change in header["changes"]) == is_told


def test_the_best_model_is_kept_and_exported_and_the_run_stops_early(tmp_path, corpus, monkeypatch, capsys):
    """The second of five evaluations is the best: its checkpoint survives a rotation of one."""
    from outcore.engine.base import EvalResult
    from outcore.engine.stream.engine import StreamEngine

    losses = iter([3.0, 2.0, 2.5, 2.4, 9.0, 9.0])
    monkeypatch.setattr(StreamEngine, "evaluate", lambda self, batches: EvalResult(next(losses), 1))
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "9", "--eval_steps", "1", "--save_steps", "1")
    argv += ["--save_total_limit", "1", "--early_stopping_patience", "2", "--precision", "fp32"]
    assert main(argv) == 0
    out = capsys.readouterr()
    assert "early stopping: 2 evaluations in a row were no better than that of step 2, eval_loss 2.0000" in out.err
    assert "the best model is exported: step 2" in out.out
    kept = sorted(path.name for path in (tmp_path / "checkpoint/r").iterdir())
    assert kept == ["step-00000002", "step-00000004"]
    best = {k.removeprefix("model:"): v for k, v in states(tmp_path / "checkpoint/r/step-00000002").items()}
    exported = weights(tmp_path / "export/r")
    assert all((exported[name] == best[name]).all() for name in exported)
    trainer = json.loads((tmp_path / "checkpoint/r/step-00000004/trainer.json").read_text())
    assert trainer["best"] == {"metric": "eval_loss", "step": 2, "value": 2.0, "since": 2}
    assert main([*argv, "--resume_from_checkpoint", "auto"]) == 0, "a resumed run knows that it is over"
    assert len(_steps(tmp_path, "loss")) == 4


def test_a_step_of_more_rows_than_the_data_has_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "one and", "completion": "two"}\n' * 3)
    short = ["--run_name", "r", "--no_export", "--max_steps", "1", "--save_strategy", "no", "--eval_fraction", "0"]
    assert main(flags(tmp_path, rows, *short, "--packing", "off")) == 0
    assert "WARNING: a step takes 4 rows, and the data has 3: each step" in capsys.readouterr().out


def test_what_counts_as_better() -> None:
    best = BestSoFar(patience=2, threshold=0.1)
    assert best.see(1, 5.0) and best.see(2, 4.95) and best.evaluations_since == 1 and not best.is_over
    assert best.see(3, 4.8) and best.evaluations_since == 0 and not best.see(4, 4.8)
    assert best.see(5, 4.75) and best.is_over and best.step == 5, "the best, though not by enough to go on"
    other = BestSoFar("loss")
    other.load_state_dict(best.state_dict())
    assert other.step is None, "another metric starts anew"


@pytest.mark.parametrize(("flags", "at"), [
    ("cosine", {0: 1.0, 50: 0.5, 100: 0.0}), ("cosine --min_lr_ratio 0.2", {0: 1.0, 50: 0.6, 100: 0.2}),
    ("cosine_with_min_lr", {50: 0.55, 100: 0.1}), ("constant", {0: 1.0, 99: 1.0}),
    ("constant_with_warmup --warmup_steps 10", {0: 0.0, 5: 0.5, 10: 1.0, 99: 1.0}),
    ("constant --warmup_ratio 0.1", {0: 0.0, 5: 0.5, 99: 1.0}), ("linear", {50: 0.5, 100: 0.0}),
    ("wsd", {50: 1.0, 90: 1.0, 95: 0.5, 100: 0.0}),
    ("warmup_stable_decay --lr_decay_ratio 0.5 --min_lr_rate 0.1", {50: 1.0, 75: 0.55, 100: 0.1}),
])  # fmt: skip
def test_schedules(flags: str, at: dict[int, float]) -> None:
    warm = [] if "warmup_" in flags.removeprefix("warmup_stable") else ["--warmup_steps", "0"]
    config = parse_config(["--lr_scheduler_type", *flags.split(), *warm])
    schedule = schedule_of(config, DeepSpeedFile(), 1.0, 100)
    assert {step: schedule.lr(step) for step in at} == pytest.approx(at)


def test_a_schedule_and_the_strategies_of_a_run(tmp_path: Path, corpus: Path) -> None:
    """By the command line: the rates of every step, and what is saved and evaluated after each pass."""
    argv = flags(tmp_path, corpus, "--run_name", "r", "--lr_scheduler_type", "wsd", "--lr_decay_ratio", "0.5")
    argv += ["--warmup_steps", "0", "--learning_rate", "1e-3", "--min_lr_ratio", "0.2", "--num_train_epochs", "2"]
    argv += ["--max_train_samples", "8", "--save_strategy", "epoch", "--eval_strategy", "epoch", "--no_export"]
    assert main([*argv, "--save_total_limit", "9", "--precision", "fp32", "--max_eval_samples", "2"]) == 0
    assert _steps(tmp_path, "lr") == pytest.approx([1e-3, 1e-3, 1e-3, 6e-4])
    evaluated = [line["step"] for line in metrics(tmp_path) if "eval_loss" in line]
    saved = [path.name for path in sorted((tmp_path / "checkpoint/r").iterdir())]
    assert evaluated == [2, 4] and saved == ["step-00000002", "step-00000004"]
    step = next(line for line in metrics(tmp_path) if line.get("step") == 1 and "event" not in line)
    assert step["step_tokens"] == 4 * 32 >= step["loss_tokens"], "tokens of a step are all of its rows'"
    assert step["tokens_per_s"] == pytest.approx(step["step_tokens"] / step["step_s"])


def test_strategies_by_epoch() -> None:
    config = parse_config(["--eval_strategy", "epoch", "--save_strategy", "epoch", "--num_train_epochs", "3",
                           "--dataset", "x.txt"])  # fmt: skip
    length = run_length(config, rows=20, step_rows=4, accumulation=2)
    assert (length.total_steps, length.eval_steps, length.save_steps) == (15, 5, 5)


@pytest.mark.parametrize(("steps", "said", "every"), [(4, "", 10), (40, "", 10), (200, "", 40), (4, "1", 1)])
def test_a_short_run_does_not_evaluate_at_every_step(steps: int, said: str, every: int) -> None:
    argv = ["--max_steps", str(steps), "--dataset", "x.txt", *(["--eval_steps", said] if said else [])]
    length = run_length(parse_config(argv), rows=20, step_rows=4, accumulation=2)
    assert length.eval_steps == length.sample_steps == every and length.save_steps == max(1, steps // 5)


@pytest.mark.parametrize(("argv", "words"), [
    ("--warmup_ratio 0.1 --warmup_steps 3", "contradict each other"),
    ("--lr_decay_ratio 0.1", "--lr_scheduler_type wsd"),
    ("--early_stopping_patience 2 --eval_strategy no", "needs evaluations"),
    ("--load_best_model_at_end --save_strategy no", "needs checkpoints"),
    ("--load_best_model_at_end --eval_steps 0", "--eval_steps above 0"),
    ("--continue_with_changes", "--resume_from_checkpoint auto"),
])  # fmt: skip
def test_contradictions(argv: str, words: str) -> None:
    refused(ConfigError, words, lambda: parse_config(argv.split()))
