"""A model that learns from a teacher's probabilities of its own answers."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import outcore.hf
from outcore.cli import main
from tests.hf.callers import tiny, tokenizer
from tests.train.methods.test_rollouts import steps_of
from tests.train.methods.test_teacher_address import Teacher, answering

pytestmark = pytest.mark.usefixtures("one_thread")


def big() -> Any:
    """A teacher that likes some tokens, whatever came before."""
    model = tiny()
    with torch.no_grad():
        hidden_H = model.model(torch.arange(64)[None]).last_hidden_state[0].mean(0)
        model.get_output_embeddings().weight[20:60] += 20 * hidden_H / hidden_H.square().sum()
    return model


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name, model in (("model", tiny()), ("teacher", big())):
        model.save_pretrained(name)
        tokenizer().save_pretrained(name)
    rows = [{"prompt": f"hello {i}"} for i in range(24)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield


def trained(*more: str, teacher: str = "teacher", steps: int = 3, name: str = "r") -> int:
    usual = ["--dataset", "rows.jsonl", "--teacher", teacher, "--num_generations", "4", "--seq_length", "32"]
    usual += ["--max_completion_length", "8", "--max_steps", str(steps), "--save_steps", "1", "--warmup_steps", "0"]
    usual += ["--learning_rate", "1e-2", "--run_name", name, "--report_to", "none"]
    return main(["train", "model", "--method", "on_policy_distill", *usual, *more])


def test_losses_are_those_of_the_policy_gradient_by_the_plain_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher's log-probabilities as transformers' model computes them, of the same answers."""
    from outcore.train.methods.rollouts import Rollouts

    given, ours = list[dict[str, Any]](), Rollouts.__call__
    monkeypatch.setattr(Rollouts, "__call__", lambda self, *args: given.append(ours(self, *args)) or given[-1])
    assert trained("--lr_scheduler_type", "constant") == 0
    teacher, steps = big().eval(), steps_of()
    for said, step in zip(given, steps, strict=True):
        less, rewards = list[float](), list[float]()
        for prompt, answer, own in zip(*(said[k] for k in ("prompt_ids", "completion_ids", "logprobs")), strict=True):
            with torch.no_grad():
                logprobs = teacher(torch.tensor([[*prompt, *answer]])).logits[0].float().log_softmax(-1)
            theirs = [float(logprobs[len(prompt) - 1 + at, token]) for at, token in enumerate(answer)]
            of_answer = [a - b for a, b in zip(theirs, own, strict=True)]
            less += of_answer
            rewards.append(sum(of_answer) / len(of_answer))
        assert step["reward"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-4) and step["reward"] < -0.05
        assert step["loss"] == pytest.approx(-sum(less) / len(less), abs=1e-4)  # the ratio's value is 1
        assert step["mismatch_max"] < 1e-4


def test_the_plan_counts_the_teachers_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    streamed, stream = list[int](), outcore.hf.stream
    monkeypatch.setattr(
        "outcore.hf.stream",
        lambda model, **given: streamed.append(sum(p.nbytes for p in model.parameters())) or stream(model, **given),
    )
    assert trained("--lora_r", "4", steps=1) == 0
    capsys.readouterr()
    asked = ["plan", "model", "--teacher", "teacher", "--method", "on_policy_distill", "--lora_r", "4", "--json"]
    main([*asked, "--machine", "rtx4070-laptop", "--nominal", "--precision", "fp32", "--num_generations", "4",
          "--seq_length", "32", "--max_completion_length", "8"])  # fmt: skip
    assert json.loads(capsys.readouterr().out)["reader_bytes"] == streamed[0]


def kl(student: Any) -> float:
    """KL(student || teacher) in nats, mean over places in rows like those that the student says."""
    ids = torch.randint(5, 290, (32, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (model.eval()(ids).logits.log_softmax(-1) for model in (student, big()))
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


def test_a_student_comes_nearer_to_its_teacher() -> None:
    flags = ["--batch_size", "8", "--grad_accum", "8", "--lr_scheduler_type", "constant", "--save_steps", "100"]
    assert trained(*flags, steps=16) == 0
    after = kl(AutoModelForCausalLM.from_pretrained("final_model/r", dtype=torch.float32))
    assert after < 0.9 * kl(tiny())
    assert trained(*flags, teacher="model", steps=1, name="itself") == 0
    (alone,) = steps_of("itself")
    assert abs(alone["reward"]) < 1e-5 and alone["grad_norm"] < 1e-3


@pytest.mark.more
def test_a_run_that_was_stopped_goes_on_to_the_same_bits_and_another_teacher_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--lora_r", "4", "--quantize", "nf4", "--lora_export", "adapter"]
    assert trained(*flags, steps=4, name="whole") == 0
    assert trained(*flags, steps=4, name="cut") == 0
    for step in (3, 4):
        shutil.rmtree(f"checkpoints/cut/step-{step:08d}")
    assert trained(*flags, "--resume_from_checkpoint", "auto", steps=4, name="cut") == 0
    assert steps_of("cut") == steps_of("whole")
    capsys.readouterr()
    again = [*flags, "--resume_from_checkpoint", "auto"]
    assert trained(*again, teacher="model", steps=4, name="cut") == 1
    assert "was made with teacher 'teacher', this run has 'model'" in capsys.readouterr().err


@pytest.mark.more
def test_a_teacher_behind_an_address_says_the_same() -> None:
    assert trained() == 0
    with answering(Teacher(big()).answer) as address:
        assert trained(teacher=address, name="far") == 0
    for near, far in zip(steps_of(), steps_of("far"), strict=True):
        assert near["reward"] == pytest.approx(far["reward"], abs=1e-4)
        assert near["loss"] == pytest.approx(far["loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--reward_function", "math_verify"], "reward_function: method on_policy_distill has its teacher alone"),
        (["--on_bad_reward", "skip"], "on_bad_reward: method on_policy_distill"),
        (["--beta", "0.1", "--lora_r", "4"], "beta: method on_policy_distill"),
        (["--teacher", "said.parquet"], "says nothing of answers that are still to come"),
        (["--teacher", "other"], "other tokens than the student"),
        (["--num_generations", "7"], "whole prompts"),
    ],
)
def test_what_cannot_be_is_said(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    big().save_pretrained("other")
    strange = copy.deepcopy(tokenizer())
    strange.add_tokens(["another"])
    strange.save_pretrained("other")
    assert trained(*more) == 2
    assert words in capsys.readouterr().err
