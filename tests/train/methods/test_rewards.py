"""Rewards of answers that a model learns from: bad ones, equal ones, and what is left out."""

import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outcore.cli import main
from tests.train.jobs import REPOSITORY, fresh_env
from tests.train.methods.test_rollouts import JUDGES, command, here, steps_of, write_files  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

FAULTS = {
    "raises": ("raise KeyError('want')", "bad raised KeyError: 'want' (judges.py, line 13)"),
    "hangs": ("time.sleep(60)", "gave no answer within 3 s and was ended"),
    "nan": ("return [float('nan')] * len(completions)", "bad returned nan for answer 1"),
    "count": ("return [1.0]", "bad returned 1 reward for 4 answers"),
    "crashes": ("os._exit(3)", "ended its process (exit code 3)"),
    "leaves a child": ("os.fork() and os._exit(3); os.setsid(); time.sleep(9)", "ended its process (exit code 3)"),
    "no list": ("return None", "bad raised TypeError: 'NoneType' object is not iterable"),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Steps of a run that no reward disturbs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("undisturbed"))
        write_files()
        assert main(command(steps=4)) == 0
        return steps_of()


@pytest.mark.more(after=2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reward_stops_the_run_and_loses_nothing(
    fault: str, undisturbed: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, words = FAULTS[fault]
    Path("judges.py").write_text(JUDGES.replace("KIND", code))
    seldom = ["--reward_timeout_s", "3", "--save_steps", "100"]
    assert main(command(*seldom, judge="bad", steps=4)) in (1, 2)
    said = capsys.readouterr().err
    assert "prompt " in said and words in said, said
    assert int(said.partition("prompt ")[2].partition(":")[0]) % 3 == 0
    done = steps_of()
    if done:
        assert f"{len(done)} step{'s' * (len(done) > 1)} before" in said and "--resume_from_checkpoint auto" in said
        assert Path(f"checkpoints/r/step-{len(done):08d}").is_dir()
    Path("judges.py").write_text(JUDGES.replace("KIND", "return [float(len(text)) for text in completions]"))
    assert main(command(*seldom, *["--resume_from_checkpoint", "auto"] * bool(done), judge="bad", steps=4)) == 0
    names = ("loss", "reward", "mismatch", "grad_norm", "step")
    assert [{name: step[name] for name in names} for step in steps_of()] == [
        {name: step[name] for name in names} for step in undisturbed
    ]


HELD = """
import fcntl, os, time
def hangs(**_):
    global held
    held = open("held", "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    os.fork()
    time.sleep(120)
"""


def _is_held() -> bool:
    """Whether a process of the reward's lives."""
    with open("held", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("is_killed", [False, True])
def test_nothing_that_a_reward_started_outlives_its_run(is_killed: bool) -> None:
    Path("judges.py").write_text(HELD)
    began_s, wait_s = time.monotonic(), "100" if is_killed else "1"
    child = subprocess.Popen(
        [sys.executable, "-m", "outcore.cli", *command("--reward_timeout_s", wait_s, judge="hangs")],
        env=fresh_env(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while child.poll() is None and not (is_killed and _is_held()):
            time.sleep(0.05)
    finally:
        child.kill()
    assert child.wait() in (1, 2, -signal.SIGKILL)
    while _is_held():
        assert time.monotonic() - began_s < 80
        time.sleep(0.05)


def test_a_fault_at_the_beginning_of_an_epoch_changes_no_bit(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text("\n".join(Path("rows.jsonl").read_text().splitlines()[:4]))
    seldom = ["--save_steps", "100"]
    assert main(command("--run_name", "whole", *seldom, steps=4)) == 0
    calls = "    with open('calls', 'a') as file:\n        file.write('.')\n    if os.stat('calls').st_size == 5:\n"
    raises = "        raise ValueError('x' * 10**6 + chr(0xD800))\n    return ["
    Path("judges.py").write_text(JUDGES.replace("    return [", calls + raises, 1))
    assert main(command(*seldom, steps=4)) == 2
    assert "x" * 500 + "... (judges.py, line 7)" in (said := capsys.readouterr().err) and len(said) < 9999
    assert len(steps_of()) == 2, "an epoch"
    assert main(command(*seldom, "--resume_from_checkpoint", "auto", steps=4)) == 0
    assert steps_of() == steps_of("whole")


def test_a_bad_prompt_is_left_out_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """A step that has no other prompt changes nothing."""
    Path("judges.py").write_text(JUDGES.replace("KIND", "raise ValueError('no')"))
    one_prompt = ["--batch_size", "4", "--grad_accum", "1", "--on_bad_reward", "skip", "--save_total_limit", "9"]
    assert main(command(*one_prompt, judge="bad", steps=6)) == 0
    said, steps = "".join(capsys.readouterr()), steps_of()
    skipped = [step["step"] for step in steps if step["skipped"]]
    assert skipped and len(skipped) < 6
    for number in range(2, 7):
        before, after = (_weights(number - 1), _weights(number))
        assert all(torch.equal(before[name], after[name]) for name in before) == (number in skipped)
    for number in skipped:
        assert f"WARNING: step {number}: prompt " in said and "Its answers are left out of this step" in said


@pytest.mark.parametrize("method", ["grpo", "gspo", "rloo"])
def test_a_prompt_that_is_left_out_counts_in_no_mean(method: str) -> None:
    """A step without the answers to its second prompt is that of the first prompt alone."""
    once = "    if not os.path.exists('once'):\n        open('once', 'w')\n    else:\n        raise ValueError('no')\n"
    Path("judges.py").write_text(JUDGES.replace("    return [", f"{once}    return [", 1))
    flags = ["--method", method, "--grad_accum", "1", "--lr_scheduler_type", "constant", "--on_bad_reward", "skip"]
    assert main(command(*flags, "--batch_size", "8", "--run_name", "two", steps=1)) == 0
    Path("once").unlink()
    assert main(command(*flags, "--batch_size", "4", "--run_name", "one", steps=1)) == 0
    (two,), (one,) = steps_of("two"), steps_of("one")
    assert two["prompts_left_out"] == 1 and one["prompts_left_out"] == 0 and one["grad_norm"] > 0
    for name in ("grad_norm", "entropy", "reward"):
        assert two[name] == pytest.approx(one[name], rel=1e-4), name
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_run_in_which_no_answer_is_judged_says_that_nothing_was_learned(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("judges.py").write_text("def never(**_):\n    raise ValueError('no')\n")
    assert main(command("--method", method, "--on_bad_reward", "skip", judge="never", steps=2)) == 0
    assert "no answer was judged, so nothing was learned" in capsys.readouterr().out
    assert all(step["skipped"] for step in steps_of())


def test_the_kl_of_a_prompt_that_is_left_out_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import trl

    Path("judges.py").write_text(JUDGES.replace("KIND", "raise ValueError('no')"))
    given, theirs = list[dict[str, Any]](), trl.GRPOTrainer._compute_loss  # pyright: ignore
    monkeypatch.setattr(
        "trl.GRPOTrainer._compute_loss",
        lambda self, model, inputs: (
            given.append({**inputs, "step": self.state.global_step + 1}) or theirs(self, model, inputs)
        ),
    )
    flags = ["--lora_r", "4", "--beta", "0.5", "--on_bad_reward", "skip"]
    assert main(command(*flags, judge="bad", steps=4)) == 0
    steps, num_partly = steps_of(), 0
    entropies = [step["entropy"] for step in steps if not step["skipped"]]
    assert min(entropies) > 0.9 * max(entropies), "answers that are left out do not count with 0"
    for step in steps:
        these = [some for some in given if some["step"] == step["step"]]
        masks = torch.cat([some["completion_mask"].sum(1) for some in these])
        assert int((masks == 0).sum()) == 4 * step["prompts_left_out"]
        assert all(int(some["num_items_in_batch"]) == int(masks.sum()) for some in these)
        assert step["mismatch_max"] < 1e-4 and (step["skipped"] or step["kl"] > 0 or step["step"] == 1)
        num_partly += step["prompts_left_out"] == 1
    assert num_partly


def _weights(step: int) -> dict[str, torch.Tensor]:
    return load_file(f"checkpoints/r/step-{step:08d}/trainer/checkpoint-{step}/model.safetensors")


def test_equal_rewards_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(judge="equal")) == 0
    said = "".join(capsys.readouterr())
    assert said.count("all answers to a prompt got the same reward (prompt ") == 1
    assert all(step["frac_reward_zero_std"] == 1 for step in steps_of())
