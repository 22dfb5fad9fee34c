"""Whatever is wrong with the newest checkpoint is named, and the next older one is used; nothing unlisted is read."""

import errno
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore.checkpoint import (
    CheckpointError,
    ShardReader,
    TensorPlan,
    check_same_run,
    config_sha256,
    mend_export,
    model_fingerprint,
    newest_checkpoint,
    open_checkpoint,
    save_checkpoint,
    write_shard,
)
from outcore.checkpoint.export import export_checkpoint
from outcore.checkpoint.manifest import Manifest
from outcore.common.listing import CHECKSUMS, damaged_weights
from tests.refused import refused

SHARD = "model-00001-of-00001.safetensors"
MODEL = {"num_attention_heads": 4, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}


def shard(path: Path, value: float) -> int:
    return write_shard(path, [TensorPlan("a", torch.float32, (3,))], lambda name: torch.full((3,), value))


def config_files(folder: Path) -> None:
    (folder / "export").mkdir()
    (folder / "export" / "tokenizer_config.json").write_text('{"model_max_length": 64}')


def save(run: Path, step: int) -> Path:
    def write(folder: Path, on_file: Callable[[Path, int], None]) -> dict[str, Any]:
        on_file(folder / SHARD, shard(folder / SHARD, float(step)))
        config_files(folder)
        return {"fingerprint": {"model": MODEL}, "config_sha256": config_sha256(MODEL), "engine": {}}

    return save_checkpoint(run, step, write, needed_bytes=1, keep=9)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4):
        save(tmp_path / "run", step)
    return tmp_path / "run"


def falls_back(run: Path) -> str:
    """What is said of the newest, when step 2 is taken."""
    said: list[str] = []
    found = newest_checkpoint(run, said.append)
    assert found is not None and found.step == 2 and len(said) == 1
    assert str(run / "step-00000004") in said[0]
    return said[0]


def test_every_single_flipped_bit_of_the_manifest_and_the_state_is_named_or_harmless(run: Path) -> None:
    draw = random.Random(0)
    for name in ("manifest.json", "trainer.json"):
        path = run / "step-00000004" / name
        before = path.read_bytes()
        for bit in sorted(draw.sample(range(8 * len(before)), 150)):
            damaged = bytearray(before)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            said: list[str] = []
            found = newest_checkpoint(run, said.append)
            assert found is not None
            if found.step == 4:  # white space became other white space
                assert name == "manifest.json" and json.loads(damaged) == json.loads(before)
            else:
                assert said and str(run / "step-00000004") in said[0]
        path.write_bytes(before)
    assert newest_checkpoint(run, pytest.fail).step == 4  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("edit", [
    lambda body: body["files"].clear(), lambda body: body["files"].pop("trainer.json"),
    lambda body: body["files"].pop(SHARD),
    lambda body: body["files"].update({"../../secret": {"bytes": 1, "crc32": 1}}),
    lambda body: body["files"].update({"/etc/hostname": {"bytes": 1, "crc32": 1}}),
    lambda body: body.update(files=None), lambda body: body.update(step=None), lambda body: body.update(step=3),
    lambda body: body.pop("files"),
])  # fmt: skip
def test_a_manifest_that_says_too_little_or_leads_out_is_refused(run: Path, edit: Callable, version: int) -> None:
    """Also with a checksum of its own that is right: this is no flipped bit but another program."""
    from outcore.common.listing import checksum_of

    path = run / "step-00000004" / "manifest.json"
    body = json.loads(path.read_text())
    edit(body)
    body["format_version"] = version
    body["checksum"] = checksum_of(body)
    path.write_text(json.dumps(body))
    falls_back(run)


def test_files_of_other_checkpoints_or_through_links_are_refused(run: Path, tmp_path: Path) -> None:
    newest = run / "step-00000004"
    (newest / "trainer.json").write_bytes((run / "step-00000002" / "trainer.json").read_bytes())
    Manifest.of(newest, 4, 9, {}, None).save(newest)
    assert "contradicts itself" in falls_back(run)
    outside = tmp_path / "outside.safetensors"
    shard(outside, 7.0)
    save(run, 4)
    (newest / SHARD).unlink()
    (newest / SHARD).symlink_to(outside)
    assert "leads out of" in falls_back(run)
    (run / "step-00000004" / "manifest.json").unlink()
    assert "has no manifest.json" in falls_back(run)


@pytest.mark.parametrize("function", ["read", "stat"])
def test_a_drive_that_fails_on_the_newest_is_named(run: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    bad = str(run / "step-00000004" / SHARD)

    def refuse(path: Any) -> None:
        if os.fspath(path) == bad:
            raise OSError(errno.EIO, "Input/output error")

    if function == "stat":
        stat = Path.stat
        monkeypatch.setattr(Path, "stat", lambda self, **how: (refuse(self), stat(self, **how))[1])
    else:
        from outcore.common import listing

        crc32_of = listing.crc32_of
        monkeypatch.setattr(listing, "crc32_of", lambda path: (refuse(path), crc32_of(path))[1])
    words = falls_back(run)
    assert "EIO" in words and bad in words and "smartctl" in words


def test_what_the_manifest_does_not_list_is_not_read(run: Path, tmp_path: Path) -> None:
    newest = run / "step-00000004"
    shard(newest / "model-00002-of-00002.safetensors", 666.0)
    (newest / "export" / "config.json").write_text('{"model_type": "not listed"}')
    checkpoint = open_checkpoint(newest)
    assert ShardReader(newest, "model").read("a").tolist() == [4.0] * 3
    folder = export_checkpoint(checkpoint, tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["model.safetensors", "tokenizer_config.json", CHECKSUMS]
    )
    assert damaged_weights(folder) == ([], [])
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 4
    (folder / "model.safetensors").write_bytes(data)
    (folder / "tokenizer_config.json").write_text("{}")
    (weights,), (other,) = damaged_weights(folder)
    assert "model.safetensors: its checksum is wrong" in weights and "tokenizer_config.json" in other


def test_damaged_export_files_are_told_and_made_again(run: Path, tmp_path: Path) -> None:
    newest = run / "step-00000004"
    (newest / "export" / "tokenizer_config.json").write_bytes(b"")
    checkpoint = newest_checkpoint(run, pytest.fail)  # type: ignore[arg-type]
    assert checkpoint is not None and checkpoint.step == 4
    assert "tokenizer_config.json: has 0 bytes" in checkpoint.damaged_export[0]
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: has 0 bytes.*makes these files again"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert mend_export(checkpoint, config_files).damaged_export == ()
    again = open_checkpoint(newest)
    assert again.damaged_export == () and again.manifest == replace(again.manifest, order=checkpoint.manifest.order)


def test_damaged_exports_and_indices_that_lead_out_are_refused_when_loaded(run: Path, tmp_path: Path) -> None:
    from outcore.model.weights.initialise import check_weight_files

    folder = export_checkpoint(open_checkpoint(run / "step-00000004"), tmp_path / "out")
    assert check_weight_files(str(folder)) == () == check_weight_files(None) == check_weight_files("owner/name")
    (folder / "tokenizer_config.json").write_text("{}")
    assert "changed since the export" in check_weight_files(str(folder))[0]
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + b"\1")
    with pytest.raises(RuntimeError, match=r"model.safetensors: its checksum is wrong.*export the model"):
        check_weight_files(str(folder))
    (folder / "model.safetensors").write_bytes(weights)
    sums = (folder / CHECKSUMS).read_text()
    (folder / CHECKSUMS).write_text(sums.replace("crc32", "crc33", 1))
    refused(RuntimeError, "damaged", lambda: check_weight_files(str(folder)))
    for name in ("../secret.safetensors", "/etc/hostname", 7):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ValueError, match="its weight_map cannot be used"):
            check_weight_files(str(folder))


def test_two_shards_with_one_tensor_are_refused(run: Path) -> None:
    newest = run / "step-00000004"
    shard(newest / "model-00002-of-00002.safetensors", 5.0)
    Manifest.of(newest, 4, 9, {}, None).save(newest)
    refused(CheckpointError, r"holds a, which .* holds as well", lambda: ShardReader(newest, "model"))


@pytest.mark.parametrize(
    ("name", "value"), [("num_attention_heads", 8), ("rope_theta", 5e5), ("rms_norm_eps", 1e-5), ("sliding", 4)]
)
def test_a_model_edited_between_run_and_resume_is_refused(run: Path, name: str, value: float) -> None:
    checkpoint = open_checkpoint(run / "step-00000004")
    check_same_run(checkpoint, {"model": MODEL})
    check_same_run(checkpoint, {"lora_r": 0})
    check_same_run(replace(checkpoint, state={"fingerprint": {}}), {"model": MODEL})  # of an older version
    was = MODEL.get(name)
    if was is not None:
        with pytest.raises(CheckpointError, match=rf"of another model: its configuration has {name} {was}"):
            check_same_run(checkpoint, {"model": {**MODEL, name: value}})
    theirs = replace(checkpoint, state={"fingerprint": {"model": {**MODEL, name: value}}})
    with pytest.raises(CheckpointError, match=f"of another model: its configuration has {name}"):
        check_same_run(theirs, {"model": MODEL})


def test_the_fingerprint_of_a_model_is_its_mathematics() -> None:
    from transformers import LlamaConfig

    one = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=64)
    again = LlamaConfig.from_dict({**one.to_dict(), "use_cache": False, "architectures": ["X"]})
    other = LlamaConfig.from_dict({**one.to_dict(), "num_attention_heads": 2})
    assert model_fingerprint(one) == model_fingerprint(again)
    assert config_sha256(model_fingerprint(one)) == config_sha256(model_fingerprint(again))
    assert config_sha256(model_fingerprint(one)) != config_sha256(model_fingerprint(other))
    assert model_fingerprint(None) is None is config_sha256(None)


def test_a_long_check_of_a_checkpoint_is_heard_of(run: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    open_checkpoint(run / "step-00000004")
    assert capsys.readouterr().err == "", "a short one says nothing"
    monkeypatch.setattr("outcore.checkpoint.folders.QUIET_S", 0.0)
    open_checkpoint(run / "step-00000004")
    said = capsys.readouterr().err.splitlines()
    assert said and all(line.startswith(f"verifying {run / 'step-00000004'}: ") and " read" in line for line in said)
