"""`outcore export`: a checkpoint becomes a model that transformers loads, whole or not at all."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outcore.checkpoint.export import export_checkpoint, how_to_load, save_export_files
from outcore.checkpoint.folders import Checkpoint, open_checkpoint, save_checkpoint
from outcore.checkpoint.shards import CheckpointError, TensorPlan, plan_shards, write_shard
from outcore.cli import main
from tests.refused import refused


def tiny(**fields: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, **fields
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    return model.to(torch.bfloat16)


def save(model: Any, run: Path, step: int, max_shard_bytes: int = 1 << 30) -> Path:
    def write(folder: Path, on_file: Any) -> dict[str, Any]:
        values = dict(model.named_parameters())
        plans = [TensorPlan(name, p.dtype, tuple(p.shape)) for name, p in values.items()]
        for name, group in plan_shards(plans, "model", max_shard_bytes):
            on_file(folder / name, write_shard(folder / name, group, lambda n: values[n]))
        save_export_files(folder, model, None)
        return {"step": step}

    return save_checkpoint(run, step, write, needed_bytes=0, keep=3)


@pytest.mark.parametrize("tied, max_shard_bytes", [(False, 1 << 30), (False, 8000), (True, 8000)])
def test_an_export_loads_with_the_same_weights(tmp_path: Path, tied: bool, max_shard_bytes: int) -> None:
    model = tiny(tie_word_embeddings=tied)
    save(model, tmp_path / "run", 3, max_shard_bytes)
    shards = [path.stat().st_size for path in sorted((tmp_path / "run").rglob("model-*"))]
    assert all(size + following > max_shard_bytes for size, following in itertools.pairwise(shards)), "filled in turn"
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert ("model.safetensors" in files) == (max_shard_bytes > 8000)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, value), (_, mine) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert value.dtype == torch.bfloat16 and torch.equal(value, mine), name
    assert json.loads((tmp_path / "out/config.json").read_text())["use_cache"] is True


def test_the_newest_of_a_run_is_taken_or_the_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = save(tiny(), tmp_path / "run", 1)
    save(tiny(), tmp_path / "run", 2)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "a")]) == 0
    assert main(["export", str(first), "--out", str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "step 2 of run run" in said and "step 1 of run run" in said


def test_refusals_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tiny(), tmp_path / "run", 1)
    (tmp_path / "there").mkdir()
    assert main(["export", str(folder), "--out", str(tmp_path / "there")]) == 2
    assert "exists already" in capsys.readouterr().err
    shard = next(folder.glob("model-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    assert main(["export", str(folder), "--out", str(tmp_path / "out")]) == 1
    assert "checksum is wrong" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nothing")]) == 2
    assert "no such run or checkpoint" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]


def test_a_checkpoint_without_the_frozen_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(folder: Path, on_file: Any) -> dict[str, Any]:
        values = {name: p for name, p in model.named_parameters() if "embed" not in name}
        plans = [TensorPlan(name, p.dtype, tuple(p.shape)) for name, p in values.items()]
        for name, group in plan_shards(plans, "model"):
            on_file(folder / name, write_shard(folder / name, group, lambda n: values[n]))
        save_export_files(folder, model, None)
        return {"step": 1}

    model = tiny()
    save_checkpoint(tmp_path / "run", 1, write, needed_bytes=0, keep=1)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "1 of 21 were not (model.embed_tokens.weight). Resume it with python train_model.py" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_copy_that_fails_half_way_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(save(tiny(), tmp_path / "run", 1))

    def fails(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outcore.checkpoint.export.files.copy_file", fails)
    refused(OSError, "No space left", lambda: export_checkpoint(checkpoint, tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(("files", "words"), [
    ({"config.json": "{}"}, "AutoModelForCausalLM.from_pretrained loads it"),
    ({"config.json": '{"is_encoder_decoder": true}'}, "AutoModelForSeq2SeqLM.from_pretrained loads it"),
    ({"config.json": "{}", "adapter_config.json": "{}"}, "peft.PeftModel.from_pretrained(base, ...) loads it"),
    ({"model.safetensors": ""}, "a model of your own: safetensors.torch.load_model loads it into what your function "
     "builds"),
    ({}, "a model of your own: its weights in shards, for load_state_dict"),
])  # fmt: skip
def test_what_loads_an_export_is_told_by_its_kind(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert how_to_load(tmp_path) == words


@pytest.mark.parametrize("frozen", [0, 3])
def test_an_own_model_is_exported_only_whole(tmp_path: Path, frozen: int) -> None:
    values = {"a": torch.ones(4)}

    def write(folder: Path, on_file: Any) -> dict[str, Any]:
        for stem in ("model", "master"):
            name = f"{stem}-00001-of-00001.safetensors"
            plans = [TensorPlan("a", torch.float32, (4,))]
            on_file(folder / name, write_shard(folder / name, plans, lambda n: values[n]))
        save_export_files(folder, torch.nn.Linear(1, 1), None)
        return {"step": 1, "fingerprint": {"parameters": 4 + frozen}}

    checkpoint = open_checkpoint(save_checkpoint(tmp_path / "run", 1, write, needed_bytes=0, keep=3))
    if frozen:
        refused(CheckpointError, "4 of the model's 7. Resume", lambda: export_checkpoint(checkpoint, tmp_path / "out"))
    else:
        assert (export_checkpoint(checkpoint, tmp_path / "out") / "model.safetensors").is_file()


def test_a_checkpoint_without_configuration_says_what_to_do(tmp_path: Path) -> None:
    def write(folder: Path, on_file: Any) -> dict[str, Any]:
        write_shard(folder / "model-00001-of-00001.safetensors", [], lambda name: torch.zeros(0))
        return {}

    folder = save_checkpoint(tmp_path / "run", 1, write, needed_bytes=0, keep=1)
    with pytest.raises(RuntimeError, match=r"older version.*train_model\.py"):
        export_checkpoint(open_checkpoint(folder), tmp_path / "out")
    assert isinstance(open_checkpoint(folder), Checkpoint)


def test_a_lora_checkpoint_gives_its_adapter(tmp_path: Path) -> None:
    import peft

    base = tiny()
    lora: Any = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(tiny(), lora)
    adapters = {n: p for n, p in model.named_parameters() if "lora_" in n}

    def write(folder: Path, on_file: Any) -> dict[str, Any]:
        from outcore.model.facts import checkpoint_name

        values = {checkpoint_name(name): p for name, p in adapters.items()}
        plans = [TensorPlan(name, p.dtype, tuple(p.shape)) for name, p in values.items()]
        name, group = plan_shards(plans, "model")[0]
        on_file(folder / name, write_shard(folder / name, group, lambda n: values[n]))
        save_export_files(folder, model, None)
        return {"step": 1}

    folder = save_checkpoint(tmp_path / "run", 1, write, needed_bytes=0, keep=1)
    assert main(["export", str(folder), "--out", str(tmp_path / "out")]) == 0
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "out"))
    found = {name: value for name, value in loaded.named_parameters() if "lora_" in name}
    assert found.keys() == adapters.keys() and len(found) == 4
    assert all(torch.equal(found[name], adapters[name]) for name in found)
