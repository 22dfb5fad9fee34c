"""Trainers of TRL and transformers leave the same bits of a streamed model as of the plain one."""

import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForImageTextToText

import outcore.hf
from outcore.data.pictures import load_processor
from tests import tiny_vision
from tests.hf.callers import FAMILIES, TRAINERS, about_pictures, assert_same, trained

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = [(which, FAMILIES[at % 3], at % 2 == 0) for at, which in enumerate(TRAINERS)]


# The other half of the combinations comes with 50 steps, below.
@pytest.mark.parametrize(("which", "family", "lora"), CASES)
def test_weights_are_those_of_the_plain_model(which: str, family: str, lora: bool, tmp_path: Path) -> None:
    plain = trained(which, family, tmp_path / "plain", lora=lora)
    assert_same(plain, trained(which, family, tmp_path / "streamed", lora=lora, prepare=outcore.hf.stream))


def test_preferences_about_pictures_are_trained_as_on_the_plain_model(tmp_path: Path) -> None:
    tiny_vision.save(tmp_path / "model")
    model, processor = str(tmp_path / "model"), load_processor(str(tmp_path / "model"))
    ends = []
    for prepare in (lambda model: model, outcore.hf.stream):
        given = {"reference": None, "peft": LoraConfig(r=4, target_modules=["q_proj", "fc1"]), "max_length": None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(7)
            made = prepare(AutoModelForImageTextToText.from_pretrained(model))
            trainer = about_pictures(processor)(made, tmp_path / "run", 3, **given)
            trainer.train()
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        ends.append(([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], weights))
    assert_same(*ends)
    assert any("vision_tower" in name for name in ends[0][1]) and ends[0][0][0] > ends[0][0][-1]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("which", TRAINERS)
def test_weights_are_those_of_the_plain_model_after_50_steps(
    which: str, family: str, lora: bool, tmp_path: Path
) -> None:
    plain = trained(which, family, tmp_path / "plain", lora=lora, steps=50)
    assert_same(plain, trained(which, family, tmp_path / "streamed", lora=lora, steps=50, prepare=outcore.hf.stream))
