"""The commands as a user types them, on a GPU: plan, train, resume, adapters, a packed base, generate, evaluate."""

import json

import pytest
import torch

from outcore.cli import main
from outcore.flow.tiles import free_device_bytes
from tests.train.jobs import fixtures, flags

corpus, shared, straight, straight_by, in_the_repository = fixtures
pytestmark = pytest.mark.gpu


def test_free_memory_is_told_for_a_device_with_and_without_its_number() -> None:
    numbered = free_device_bytes(torch.device("cuda", torch.cuda.current_device()))
    assert numbered is not None and numbered > 0
    assert abs((free_device_bytes(torch.device("cuda")) or 0) - numbered) < 1 << 30  # others may use the card


@pytest.mark.parametrize("more", [(), ("--lora_r", "4"), ("--lora_r", "4", "--quantize", "nf4")], ids=" ".join)
def test_a_model_is_planned_trained_continued_and_used(tmp_path, corpus, more, capsys):
    argv = flags(tmp_path, corpus, "--run_name", "r", "--save_steps", "2", "--eval_steps", "2", *more)
    assert main(["plan", "--preset", "tiny", "--nominal"]) == 0
    assert main(["train", *argv, "--max_steps", "2", "--no_export"]) == 0
    assert (
        main(["train", *argv, "--max_steps", "4", "--resume_from_checkpoint", "auto", "--continue_with_changes"]) == 0
    )
    lines = [json.loads(line) for line in (tmp_path / "log/r/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses and all(0 < loss < 20 for loss in losses)
    capsys.readouterr()
    model = str(tmp_path / "export/r")
    assert main(["generate", model, "--prompt", "the quick", "--max_tokens", "4"]) == 0
    assert capsys.readouterr().out.strip()
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "the quick brown fox jumps"}\n')
    assert main(["score", model, "--input", str(texts), "--output", str(tmp_path / "scores.jsonl")]) == 0
    assert "perplexity" in (tmp_path / "scores.jsonl").read_text()
