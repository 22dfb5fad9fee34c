"""Exports hold what `save_pretrained` writes: the names and shapes of a published checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from outcore.checkpoint import published as published_module
from outcore.checkpoint.export import export_model, save_export_files
from outcore.checkpoint.folders import save_checkpoint
from outcore.checkpoint.shards import TensorPlan, plan_shards, write_shard
from outcore.cli import main
from tests.flow.models import tiny_loaded
from tests.refused import failing

KINDS = ["llama", "mixtral", "qwen3_moe", "deepseek_v3", "granitemoe", "gpt_neox", "jamba", "gpt_oss"]
CONVERTED = ("mixtral", "qwen3_moe", "deepseek_v3", "granitemoe", "gpt_neox", "jamba")


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def save(model: Any, run: Path) -> Path:
    """A checkpoint of an engine, which keeps the names in memory."""
    values = model.state_dict()
    names = [name for name in values if name != "lm_head.weight" or not model.config.tie_word_embeddings]

    def write(folder: Path, on_file: Any) -> dict[str, Any]:
        plans = [TensorPlan(name, values[name].dtype, tuple(values[name].shape)) for name in names]
        for name, group in plan_shards(plans, "model", 40_000):
            on_file(folder / name, write_shard(folder / name, group, lambda n: values[n]))
        save_export_files(folder, model, None)
        return {"step": 1}

    return save_checkpoint(run, 1, write, needed_bytes=0, keep=1)


@pytest.mark.more(after=3)
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_what_save_pretrained_writes(kind: str, tmp_path: Path) -> None:
    """At the end of a run, in several shards; and of a checkpoint, which holds the names in memory."""
    model: Any = tiny_loaded(kind).model
    model.save_pretrained(tmp_path / "theirs")
    expected = weights_in(tmp_path / "theirs")
    assert bool(dict(model.named_parameters()).keys() - expected.keys()) == (kind in CONVERTED)
    export_model(tmp_path / "ours", model, torch.Tensor.detach, max_shard_bytes=40_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert same(weights_in(tmp_path / "ours"), expected)
    assert main(["export", str(save(model, tmp_path / "run")), "--out", str(tmp_path / "later")]) == 0
    assert same(weights_in(tmp_path / "later"), expected)
    for folder in ("ours", "later"):
        read: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert same(read.state_dict(), model.state_dict())


def test_every_weight_is_read_once(tmp_path: Path) -> None:
    model: Any = tiny_loaded("mixtral").model
    read: list[str] = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def weight_of(parameter: nn.Parameter) -> torch.Tensor:
        read.append(names[id(parameter)])
        return parameter.detach()

    export_model(tmp_path / "out", model, weight_of)
    assert sorted(read) == sorted(names.values())


def test_the_file_that_a_model_was_read_from_decides_no_names(tmp_path: Path) -> None:
    model: Any = tiny_loaded("mixtral").model
    model.save_pretrained(tmp_path / "theirs")
    model._weight_conversions = attached = []
    export_model(tmp_path / "ours", model, torch.Tensor.detach)
    assert same(weights_in(tmp_path / "ours"), weights_in(tmp_path / "theirs"))
    assert model._weight_conversions is attached


def test_names_that_cannot_be_found_are_told_and_nothing_is_lost(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(published_module, "_reverted", failing(KeyError("a converter of another version")))
    model: Any = tiny_loaded("mixtral").model
    export_model(tmp_path / "out", model, torch.Tensor.detach)
    assert "other programs may not know" in caplog.text and "a converter of another version" in caplog.text
    assert same(weights_in(tmp_path / "out"), model.state_dict())
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same(read.state_dict(), model.state_dict())
