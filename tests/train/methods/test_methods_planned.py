"""Forecasts of the methods beside the loop's own."""

import json

import pytest

import outcore
from outcore.cli import main

MACHINE = ["--machine", "rtx4070-laptop", "--nominal"]


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict]:
    code = main(["plan", "llama-8b", *MACHINE, "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def test_a_reference_costs_a_forward_and_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lora_r", "16", "--quantize", "nf4", "--lora_export", "adapter"]
    (code, dpo), (_, orpo) = (planned(capsys, "--method", method, *flags) for method in ("dpo", "orpo"))
    assert code == 0 and dpo["fits"]
    assert dpo["vram_bytes"] == orpo["vram_bytes"] and dpo["ram_bytes"] == orpo["ram_bytes"]
    assert 1.2 < dpo["step_s"] / orpo["step_s"] < 1.4


def test_logits_take_the_device_by_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [planned(capsys, "--method", "orpo", "--lora_r", "8", "--batch_size", n)[1]["vram_bytes"] for n in "12"]
    assert sizes[1] - sizes[0] == 2 * 1024 * 128256 * 2 * 3


def test_full_training_of_8b_does_not_fit_a_laptop(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, "--method", "dpo")
    assert code == 1 and not found["fits"]
    assert found["ram_bytes"] > 8e9 * 16 and found["vram_bytes"] > 4 * 218e6 * 2
    assert "computed once, before the first step" in "".join(found["words"])


def test_from_python_and_by_train(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"machine": "rtx4070-laptop", "nominal": True, "method": "reward", "lora_r": 8}
    found = outcore.plan("llama-1b", **asked)
    assert found.fits and found.seconds > 0 and "reward, llama-1b" in str(found)
    assert main(["train", "--preset", "tiny", "--method", "dpo", "--plan"]) == 2
    assert "outcore plan MODEL --method dpo" in capsys.readouterr().err


def test_rollouts_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds of answering, and keys and values, which wait in turns where there is no room for all at once."""
    flags = ["--method", "grpo", "--lora_r", "16", "--quantize", "nf4", "--lora_export", "adapter"]
    batch = ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "8"]
    (_, short), (_, long) = (planned(capsys, *flags, "--max_completion_length", n) for n in ("128", "256"))
    assert 0 < short["rollout_s"] < short["step_s"] and 1.5 < long["rollout_s"] / short["rollout_s"] < 3, "less stays"
    stays = [int("".join(plan["words"]).partition(" layers that stay")[0].split()[-1]) for plan in (short, long)]
    assert 32 > stays[0] > stays[1] > 0 and short["vram_bytes"] <= 8 * 2**30
    _, refers = planned(capsys, *flags, "--max_completion_length", "128", "--beta", "0.1")
    assert refers["step_s"] > short["step_s"] and refers["rollout_s"] == short["rollout_s"]
    code, many = planned(capsys, *flags, *batch, "--max_completion_length", "512")
    words = "".join(many["words"])
    assert code == 0 and "8 answers of 512 tokens to each of 8 prompts of 512" in words
    assert "4.50 GiB of keys and values in " in words and "freed before the update" in words
    assert main(["plan", "llama-70b", *MACHINE, "--json", "--method", "grpo", "--lora_r", "16"]) == 1
    assert json.loads(capsys.readouterr().out)["rollout_s"] < 24 * 3600, "answers one after the other at most"


def test_a_teacher_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights in RAM, its embedding, head and two layers on the device, and seconds of one pass for 64 answers."""
    flags = ["--lora_r", "16", "--quantize", "nf4", "--lora_export", "adapter"]
    _, alone = planned(capsys, "--method", "grpo", *flags)
    _, server = planned(capsys, "--method", "on_policy_distill", *flags, "--teacher", "http://127.0.0.1:1")
    assert {**server, "method": 0, "words": 0} == {**alone, "method": 0, "words": 0}
    found = {}
    for rows in ("2", "16", "32"):
        batch = ["--batch_size", rows, "--grad_accum", "4", "--max_completion_length", "8", "--seq_length", "32"]
        _, without = planned(capsys, "--method", "grpo", *flags, *batch)
        _, found[rows] = planned(capsys, "--method", "on_policy_distill", *flags, *batch, "--teacher", "llama-70b")
        assert "its teacher llama-70b lies in RAM beside it (131." in "".join(found[rows]["words"])
        assert found[rows]["reader_bytes"] == found[rows]["ram_bytes"] - without["ram_bytes"] > 2 * 70e9
        others_s = without["step_s"] - without["rollout_s"] + found[rows]["rollout_s"]
        assert found[rows]["step_s"] == pytest.approx(others_s + found[rows]["reader_s"])
    assert found["2"]["vram_bytes"] > 2 * 2 * 128256 * 8192 + 2 * 2 * 855e6
    assert found["16"]["reader_s"] == found["2"]["reader_s"] < found["32"]["reader_s"] / 1.9


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num_generations", "7"], "not of whole prompts of 7"),
        (["--max_completion_length", "1024"], "leaves no room for a prompt"),
    ],
)
def test_rollouts_that_cannot_be_are_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-8b", *MACHINE, "--method", "grpo", *flags]) == 2
    assert words in capsys.readouterr().err
