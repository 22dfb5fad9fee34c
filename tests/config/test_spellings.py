"""What users of the Trainer, TRL, axolotl and LLaMA-Factory type: each spelling works or is told what it is here."""

import re
import shlex
from pathlib import Path

import pytest

from outcore.config import FIELDS, ConfigError
from outcore.config.spellings import MEANINGS
from outcore.train.configure import parse_config
from tests.refused import refused

ACCEPTED = {
    "lora_rank": ("16", "lora_r", 16), "lora_target": ("q_proj,v_proj", "lora_target_modules", "q_proj,v_proj"),
    "target_modules": ("q_proj", "lora_target_modules", "q_proj"), "cutoff_len": ("512", "seq_length", 512),
    "sequence_len": ("512", "seq_length", 512), "block_size": ("512", "seq_length", 512),
    "max_seq_length": ("512", "seq_length", 512), "base_model": ("gpt2", "model_name_or_path", "gpt2"),
    "model": ("gpt2", "model_name_or_path", "gpt2"), "dataset_name": ("x.jsonl", "dataset", ("x.jsonl",)),
    "resume": ("auto", "resume_from_checkpoint", "auto"), "num_epochs": ("3", "num_train_epochs", 3.0),
    "epochs": ("3", "num_train_epochs", 3.0), "lr": ("1e-4", "learning_rate", 1e-4),
    "lr_scheduler": ("cosine", "lr_scheduler_type", "cosine"),
    "micro_batch_size": ("4", "per_device_train_batch_size", 4), "max_samples": ("9", "max_train_samples", 9),
    "evaluation_strategy": ("epoch", "eval_strategy", "epoch"),
    "gradient_checkpointing": ("true", "activation_checkpointing", True),
}  # fmt: skip


@pytest.mark.parametrize("spelling", ACCEPTED)
def test_other_names_of_a_setting_work(spelling: str) -> None:
    value, ours, expected = ACCEPTED[spelling]
    more = (["--lora_r", "4"] * ("target" in spelling)) + (["--model", "x/y"] * ("lora" in ours or "target" in ours))
    assert getattr(parse_config([f"--{spelling}", value, *more]), ours) == expected


@pytest.mark.parametrize("spelling", MEANINGS)
def test_a_setting_by_another_name_is_told_by_meaning(spelling: str, tmp_path: Path) -> None:
    """As a flag and in YAML; what is advised exists."""
    refused(ConfigError, f"unknown flag --{spelling}. Here: ", lambda: parse_config([f"--{spelling}"]))
    refused(ConfigError, f"unknown flag --{spelling}. Here: ", lambda: parse_config(["x/y", f"--{spelling}", "1"]))
    file = tmp_path / "run.yaml"
    file.write_text(f"{spelling}: 1\n")
    refused(ConfigError, f"unknown setting '{spelling}'. Here: ", lambda: parse_config(["--config", str(file)]))
    known = {*FIELDS, *(alias for row in FIELDS.values() for alias in row.spec.aliases), "num_gpus", "model"}
    for flag in re.findall(r"--(\w+)", MEANINGS[spelling]):
        assert flag in known, flag
    advised = MEANINGS[spelling].partition(":")[0].partition(" (")[0]
    if re.fullmatch(r"--\w+ [a-z0-9.]+", advised) and "wandb" not in advised:
        parse_config([*shlex.split(advised), *(["--model", "x/y"] * ("lora" in advised))])


def test_the_command_tells_the_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    from outcore.cli import main

    assert main(["train", "--load_in_4bit"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: unknown flag --load_in_4bit. Here: --quantize nf4, with --lora_r 16.")


def test_no_spelling_is_a_setting_as_well() -> None:
    names = {*FIELDS, *(alias for row in FIELDS.values() for alias in row.spec.aliases)}
    assert not names & MEANINGS.keys()
