"""The page for those who come from Hugging Face's Trainer: each of its tables is held against what it speaks of."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from outcore.config import FIELDS, DeepSpeedFile, ProcessFacts, TrainConfig, read_deepspeed_file, resolve
from outcore.config.spellings import meaning_of
from tests.forked import ROOT
from tests.train.runs.test_parity import CASES, RATES, Case

PAGE = (ROOT / "docs/from_hf_trainer.md").read_text(encoding="utf-8")
OURS = {name: row.name for row in FIELDS.values() for name in (row.name, *row.spec.aliases)}


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without marks of code."""
    table = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in cells] for cells in found[2:]]


def parity_rows() -> list[str]:
    """A line for each case that is compared, step by step."""
    return [f"| {name} | {_code(case.ours)} | {_code(_theirs(case))} |" for name, case in (CASES | RATES).items()]


def _code(words: str) -> str:
    return f"`{words}`" if words else "–"


def _theirs(case: Case) -> str:
    said = [f"{name}={value!r}" for name, value in case.theirs.items()]
    said += [f"LoraConfig({', '.join(f'{name}={value!r}' for name, value in case.lora.items())})"] if case.lora else []
    return ", ".join([*said, *["torch.optim.AdamW(model.parameters())"] * (case.optimizer is not None)])


def test_every_case_that_the_page_names_is_compared() -> None:
    table = PAGE.split("## What is the same\n")[1].split("\n## ")[0]
    shown = [line for line in table.splitlines() if line.startswith("| ") and "| what |" not in line]
    assert shown == parity_rows(), "python -c 'from tests.docs.test_from_hf_trainer import *; print(*parity_rows())'"


def test_names_are_taken_or_explained() -> None:
    from peft import LoraConfig
    from transformers import TrainingArguments
    from trl import SFTConfig

    theirs = {f.name for kind in (TrainingArguments, SFTConfig, LoraConfig) for f in dataclasses.fields(kind)}
    for name, here in rows("Names"):
        if name in OURS:
            assert here == f"--{OURS[name]}", name
        else:
            assert meaning_of(name) == f" Here: {here}.", name
        assert name in theirs or name in ("load_in_4bit", "r"), name


def test_defaults_are_those_of_either(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainingArguments

    monkeypatch.chdir(ROOT)
    usual: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for file in (DeepSpeedFile(), read_deepspeed_file("deepspeed_config.json")):
        tuned = resolve(TrainConfig(model_name_or_path="x"), file, ProcessFacts("bf16"))
        adapted = resolve(TrainConfig(model_name_or_path="x", lora_r=16), file, ProcessFacts("bf16"))
        assert not tuned.decay_all
        for name, here, there in rows("Defaults that differ"):
            assert there.split()[0] == str(usual[name]), name
            if hasattr(tuned, name):
                said = [str(getattr(of, name)) for of in (tuned, adapted)]
                assert re.findall(r"[\d.e-]+(?=\b)", here)[: len(set(said))] == list(dict.fromkeys(said)), name
            elif name in OURS and not here.startswith("3 %"):
                assert here.split()[0] == f"{getattr(TrainConfig, OURS[name]):g}", name


def test_the_files_that_hold_what_differs_are_there() -> None:
    for path in re.findall(r"`(tests/[^`]+)`", PAGE):
        file, _, name = path.partition("::")
        assert f"def {name}(" in Path(ROOT / file).read_text(encoding="utf-8") if name else (ROOT / file).is_file(), (
            path
        )
