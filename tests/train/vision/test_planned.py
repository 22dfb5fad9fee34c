"""`outcore plan` of an image-text model: its tower's bytes beside the text's, and what is not forecast in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

from outcore.cli import main
from outcore.model import resolve_shape
from tests import tiny_vision

MACHINE = ("--machine", "rtx4070-laptop", "--nominal")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.save(tmp_path_factory.mktemp("plan") / "sees")


def test_text_and_tower_are_all_of_the_model(folder):
    shape, model = resolve_shape(str(folder)), AutoModelForImageTextToText.from_pretrained(folder)
    tower = sum(p.numel() for name, p in model.named_parameters() if "vision" in name or "projector" in name)
    assert shape.seeing_params == tower and shape.num_layers == 2
    assert shape.seeing_params + shape.base_params == sum(p.numel() for p in model.parameters())


def test_the_towers_bytes_are_told_and_what_is_not_forecast(folder, capsys):
    assert main(["plan", "--model", str(folder), *MACHINE, "--lora_r", "4"]) == 0
    assert "its tower and projector (221.38 KiB) are frozen in RAM" in capsys.readouterr().out
    assert main(["plan", "--infer", str(folder), *MACHINE]) == 2
    assert "its answers about pictures are not forecast" in capsys.readouterr().err
    assert main(["plan", "--model", str(folder), *MACHINE, "--method", "dpo"]) == 2
    assert "method dpo: image-text models" in capsys.readouterr().err
