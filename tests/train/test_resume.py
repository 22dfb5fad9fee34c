"""Stopping, saving and going on: bit for bit, with what was changed said, and never from a broken model."""

import dataclasses
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outcore.engine.base import StepResult
from outcore.train.run import main
from tests.train.jobs import (
    ENGINES,
    engine_of,
    fixtures,
    flags,
    metrics,
    same,
    states,
)

corpus, shared, straight, straight_by, in_the_repository = fixtures
SLOW = pytest.mark.slow
DEEPSPEED_SLOWLY = ["stream", pytest.param("deepspeed", marks=SLOW)]
"""What the trainer does, whichever engine it drives."""


@pytest.mark.parametrize("how", [
    "stream", pytest.param("deepspeed", marks=pytest.mark.more), pytest.param("zero1", marks=SLOW),
    pytest.param("zero2", marks=SLOW), pytest.param("none", marks=SLOW),
])  # fmt: skip
def test_resume_is_bit_identical(tmp_path: Path, corpus: Path, straight_by: Callable[[str], Path], how: str) -> None:
    """Stopped after step 2 and resumed to 6 equals six steps at once; for each engine and ZeRO stage."""
    extra = ["--run_name", "r", "--max_steps", "6", "--precision", "bf16", "--no_export"]
    if how in ENGINES:
        reference = straight_by(how)
        extra += ENGINES[how]
    else:
        reference = tmp_path / "whole"
        extra += ["--zero_stage", how]
        assert main(flags(reference, corpus, *extra, "--save_steps", "0", "--eval_steps", "0")) == 0
    argv = flags(tmp_path, corpus, *extra, "--save_steps", "2", "--eval_steps", "3")

    class Killed(Exception):
        pass

    from outcore.train.loop import TrainingLoop

    original = TrainingLoop.train_one

    def dies(self: TrainingLoop, batches: object):
        if self.step == 3:
            raise Killed
        return original(self, batches)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "train_one", dies)
        with pytest.raises(Killed):
            main(argv)
    torch.manual_seed(999)
    assert main([*argv, "--resume_from_checkpoint", "auto"]) == 0
    got = states(tmp_path / "checkpoint/r/step-00000006")
    assert same(got, states(reference / "checkpoint/r/step-00000006"))
    assert [line["step"] for line in metrics(tmp_path) if "event" not in line] == [1, 2, 3, 4, 5, 6]
    whole = {line["step"]: line["loss"] for line in metrics(reference) if "event" not in line}
    parts = {line["step"]: line["loss"] for line in metrics(tmp_path) if "event" not in line}
    assert parts == whole
    assert engine_of(tmp_path)["name"] == ("stream" if how == "stream" else "deepspeed")
    if how not in ENGINES:
        assert f"zero_stage {how} was asked for" in engine_of(tmp_path)["reason"]


def test_a_refused_resume_leaves_the_log_whole(tmp_path, corpus, capsys):
    argv = flags(tmp_path, corpus, "--max_steps", "2", "--save_steps", "1", "--run_name", "r", "--no_export")
    assert main(argv) == 0
    before = (tmp_path / "log" / "r" / "metrics.jsonl").read_bytes()
    start = str(tmp_path / "checkpoint" / "r" / "step-00000001")
    assert main([*argv, "--seq_length", "16", "--resume_from_checkpoint", start]) == 2
    assert "the data position cannot be restored" in capsys.readouterr().err
    assert (tmp_path / "log" / "r" / "metrics.jsonl").read_bytes() == before


@pytest.mark.more
def test_a_checkpoint_resumes_in_another_stage(tmp_path: Path, corpus: Path, straight: Path) -> None:
    """Checkpoints know nothing of engine and ZeRO stage: the restored states are the same numbers."""
    start = straight / "checkpoint/r/step-00000004"
    for stage in ("none", "zero2"):
        root = tmp_path / stage
        argv = flags(root, corpus, "--run_name", "r", "--max_steps", "6", "--precision", "bf16", "--no_export")
        argv += [
            "--zero_stage", stage, "--resume_from_checkpoint", str(start), "--save_steps", "1", "--eval_steps", "0",
        ]  # fmt: skip
        assert main([*argv, "--save_total_limit", "9"]) == 0
        got, want = states(root / "checkpoint/r/step-00000006"), states(straight / "checkpoint/r/step-00000006")
        for key in want:
            torch.testing.assert_close(got[key].float(), want[key].float(), rtol=0.1, atol=3e-3, msg=key)


def test_signal_saves_and_says_how_to_resume(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from outcore.train.loop import TrainingLoop

    original = TrainingLoop.train_one

    def signalled(self: TrainingLoop, batches: object):
        result = original(self, batches)  # type: ignore[arg-type]
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "train_one", signalled)
        argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "5", "--eval_steps", "0", "--save_steps", "0")
        assert main(argv) == 130
    out = capsys.readouterr()
    assert "--resume_from_checkpoint auto" in out.out and "SIGINT: finishing this step" in out.err
    assert [p.name for p in (tmp_path / "checkpoint/r").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("engine", DEEPSPEED_SLOWLY)
def test_what_a_resumed_run_changes_is_said(tmp_path, corpus, straight_by, capsys, engine):
    start = str(straight_by(engine) / "checkpoint/r/step-00000004")
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "6", "--precision", "bf16", *ENGINES[engine])
    argv += ["--no_export", "--save_steps", "1", "--save_total_limit", "9", "--resume_from_checkpoint"]

    def changed(*argv: str) -> list[str]:
        capsys.readouterr()
        assert main(list(argv)) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume: ")]

    other = ["--weight_decay", "0.3", "--adam_beta1", "0.8", "--adam_beta2", "0.95", "--adam_epsilon", "1e-7"]
    said = changed(*argv, start, *other, "--max_grad_norm", "0.5", "--state_format", "fp32")
    assert said == [
        "resume: weight_decay 0.01 -> 0.3: training goes on with 0.3",
        "resume: adam_beta1 0.9 -> 0.8: training goes on with 0.8",
        "resume: adam_beta2 0.999 -> 0.95: training goes on with 0.95",
        "resume: adam_epsilon 1e-08 -> 1e-07: training goes on with 1e-07",
        "resume: max_grad_norm 1.0 -> 0.5: training goes on with 0.5",
        "resume: state_format split -> fp32: training goes on with fp32; the states are converted exactly",
    ]
    other += ["--max_grad_norm", "0.5", "--state_format", "fp32"]
    assert changed(*argv, str(tmp_path / "checkpoint/r/step-00000005"), *other) == []


@pytest.mark.slow
def test_another_format_of_states_and_dropout_of_adapters_is_said(tmp_path, corpus, capsys):
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "2", "--precision", "bf16", "--no_export")
    argv += ["--lora_r", "4", "--save_steps", "1"]
    assert main(argv) == 0
    start = str(tmp_path / "checkpoint/r/step-00000001")
    argv += ["--resume_from_checkpoint", start, "--lora_dropout", "0.5", "--state_format", "split8"]
    assert main(argv) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume: ")] == [
        "resume: lora_dropout 0.0 -> 0.5: training goes on with 0.5",
        "resume: state_format split -> split8: training goes on with split8; the moments are rounded to 8 bits once",
    ]


@pytest.mark.parametrize("engine", DEEPSPEED_SLOWLY)
def test_a_model_without_a_finite_validation_loss_is_never_saved(tmp_path, corpus, capsys, engine):
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "4", "--save_total_limit", "1", *ENGINES[engine])
    argv += ["--precision", "bf16", "--learning_rate", "1e6", "--decay_all", "--save_steps", "1", "--eval_steps", "2"]
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert "the validation loss of step 2 is nan" in error and "the last checkpoint is that of step 1" in error
    assert [p.name for p in (tmp_path / "checkpoint/r").iterdir()] == ["step-00000001"]
    assert not (tmp_path / "export" / "r").exists()


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("bad_step", "more", "code", "kept", "words"), [
    (2, [], 0, "134", "the loss of step 2 is inf: this model is not saved; the last checkpoint is that of step 1"),
    (4, [], 0, "1234", "step 4: validation loss "),  # it is finite: the model is good
    (4, ["--eval_fraction", "0"], 1, "123", "the loss of step 4 is inf, the run's last: this model is not saved"),
])  # fmt: skip
def test_no_checkpoint_is_made_while_the_training_loss_is_not_finite(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    bad_step: int, more: list[str], code: int, kept: str, words: str,
) -> None:  # fmt: skip
    """As in fp16, where such a step is skipped and the run goes on."""
    from outcore.engine.stream.engine import StreamEngine

    original = StreamEngine.train_step

    def overflows(self: StreamEngine, micro_batches: list, lr: float) -> StepResult:
        result = original(self, micro_batches, lr)
        return dataclasses.replace(result, loss=math.inf, skipped=True) if self.updates == bad_step else result

    monkeypatch.setattr(StreamEngine, "train_step", overflows)
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "4", "--save_total_limit", "9", "--no_export")
    assert main([*argv, "--save_steps", "1", "--eval_steps", "0", *more]) == code
    said = capsys.readouterr()
    assert words in said.err + said.out
    assert sorted(p.name for p in (tmp_path / "checkpoint/r").iterdir()) == [f"step-0000000{n}" for n in kept]


@pytest.mark.more
def test_auto_goes_on_from_where_a_run_went_back_to(tmp_path, corpus, capsys):
    from outcore.train.loop import TrainingLoop

    run = tmp_path / "checkpoint" / "r"
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "4", "--eval_steps", "0", "--save_steps", "1")
    argv += ["--save_total_limit", "9", "--no_export", "--resume_from_checkpoint"]
    assert main([*argv, "auto"]) == 0
    original = TrainingLoop.train_one

    def dies(self: TrainingLoop, batches: object):
        if self.step == dies_at:
            raise RuntimeError("killed")
        return original(self, batches)  # type: ignore[arg-type]

    for start, dies_at, went_on_from in ((str(run / "step-00000001"), 1, 1), ("auto", 2, 1), ("auto", 9, 2)):
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrainingLoop, "train_one", dies)
            assert main([*argv, start]) == (0 if dies_at == 9 else 1)
        said = capsys.readouterr()
        assert f"step-0000000{went_on_from} at step {went_on_from}\n" in said.out
        left = "step-00000002, step-00000003, step-00000004 of this run: left behind"
        assert (left in said.out + said.err) == (start != "auto")
    assert [line["step"] for line in metrics(tmp_path) if "event" not in line] == [1, 2, 3, 4]
