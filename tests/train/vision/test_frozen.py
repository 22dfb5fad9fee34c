"""A frozen tower reads a row's pictures once for all epochs, and the run has the bits that it has without that."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from outcore import hf
from outcore.hf import TowerOutputs
from tests.train.vision.test_vision import made, train, weights  # noqa: F401  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread")
ALONE = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2", "--max_steps", "6")
FROZEN = ("--train_vision", "none", "--lora_r", "4", "--lora_dropout", "0.5", *ALONE)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pictures of each call of the tower."""
    found, look = list[int](), SiglipVisionModel.forward

    def noted(self: Any, pixel_values: torch.Tensor, **how: Any) -> Any:
        found.append(len(pixel_values))
        return look(self, pixel_values, **how)

    monkeypatch.setattr(SiglipVisionModel, "forward", noted)
    return found


def same(one: Path, other: Path) -> bool:
    found = weights(other)
    return all(torch.equal(tensor, found[name]) for name, tensor in weights(one).items())


def test_later_epochs_look_at_nothing_again_and_end_in_the_same_bits(made, tmp_path, looks, monkeypatch, capsys):  # noqa: F811
    with monkeypatch.context() as without:
        without.setattr(hf.TowerOutputs, "keep_of", lambda self, model: None)
        assert train(made, tmp_path / "plain", *FROZEN) == 0
    assert sorted(looks) == [1] * 6 + [2] * 6, "three epochs of four rows"
    looks.clear()
    assert train(made, tmp_path / "kept", *FROZEN, "--save_steps", "3") == 0
    assert sorted(looks) == [1, 1, 2, 2] and same(tmp_path / "plain", tmp_path / "kept")
    assert "later epochs reuse what the frozen tower made" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "kept" / "checkpoint" / "seen" / "step-00000006")
    looks.clear()
    assert train(made, tmp_path / "kept", *FROZEN, "--save_steps", "3", "--resume_from_checkpoint", "auto") == 0
    assert sorted(looks) == [1, 1, 2, 2] and same(tmp_path / "plain", tmp_path / "kept"), "a resumed run keeps anew"


@pytest.mark.parametrize(
    "told",
    [
        ("--train_vision", "full", *ALONE),
        ("--train_vision", "lora", "--lora_r", "4", *ALONE),
        ("--train_vision", "none", "--lora_r", "4", "--max_steps", "3"),  # two rows at a time: another two each epoch
    ],
)
def test_a_tower_that_learns_or_sees_other_company_looks_each_time(told, made, tmp_path, looks):  # noqa: F811
    assert train(made, tmp_path, *told, "--export", "false") == 0
    assert sum(looks) == 18


class Tower(torch.nn.Module):
    """Doubles what it is given, by one weight."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight, self.dropout, self.calls = torch.nn.Parameter(torch.tensor(2.0), False), dropout, 0

    def get_image_features(self, pixels: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
        self.calls += 1
        return [torch.nn.functional.dropout(pixels * self.weight * scale, self.dropout)]


def test_outputs_are_found_by_content_and_changing_them_changes_nothing():
    tower, pixels = Tower(), torch.arange(6.0)
    TowerOutputs(1 << 20, evicts=False).keep_of(tower)
    first = tower.get_image_features(pixels)[0]
    first += 1
    (again,) = tower.get_image_features(pixels.clone())
    assert tower.calls == 1 and again.tolist() == [0, 2, 4, 6, 8, 10]
    again += 1
    assert tower.get_image_features(pixels)[0].tolist() == [0, 2, 4, 6, 8, 10] and tower.calls == 1
    for other in (pixels + 1, pixels.reshape(2, 3), pixels.to(torch.bfloat16)):
        tower.get_image_features(other)
    tower.get_image_features(pixels, scale=3.0)
    assert tower.calls == 5


@pytest.mark.parametrize("why", ["draws", "learns"])
def test_what_is_not_the_same_each_time_is_not_kept(why):
    tower = Tower(0.5 if why == "draws" else 0.0)
    tower.weight.requires_grad_(why == "learns")
    kept = TowerOutputs(1 << 20, evicts=False)
    kept.keep_of(tower)
    for _ in range(2):
        tower.get_image_features(torch.ones(8))
    assert tower.calls == 2 and kept.kept_bytes == 0


def test_room_is_kept_to_by_staying_or_giving_way():
    pictures = [torch.full((8,), float(number)) for number in range(3)]  # 32 bytes each
    for evicts, calls in ((False, 4), (True, 6)):
        tower, kept = Tower(), TowerOutputs(64, evicts=evicts)
        kept.keep_of(tower)
        for number in (0, 1, 2, 0, 1, 2):
            tower.get_image_features(pictures[number])
            assert kept.kept_bytes <= 64
        assert tower.calls == calls
