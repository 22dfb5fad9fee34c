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
