"""Checkpoints: streamed safetensors, atomic, verified, rotated, swept."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from outcore.checkpoint import folders as ck
from outcore.checkpoint.manifest import crc32_of
from outcore.checkpoint.same_run import check_same_run
from outcore.checkpoint.shards import CheckpointError, ShardReader, TensorPlan, plan_shards, write_shard
from tests.forked import run_script
from tests.refused import refused

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3)), min_size=1, max_size=6
    ),
    limit=st.integers(1, 400),
)
def test_shards_hold_what_was_written(tmp_path_factory: pytest.TempPathFactory, shapes: list, limit: int) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = {f"t{i}": (torch.rand(shape) * 9).to(dtype) for i, (dtype, shape) in enumerate(shapes)}
    plans = [TensorPlan(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]
    seen: dict[str, torch.Tensor] = {}
    for name, group in plan_shards(plans, "model", limit):
        crc = write_shard(folder / name, group, tensors.__getitem__)
        assert crc == crc32_of(folder / name)
        seen.update(load_file(folder / name))  # the reference reader of the format
    reader = ShardReader(folder, "model")
    assert set(seen) == set(tensors) == set(reader.names())
    for name, tensor in tensors.items():
        assert torch.equal(seen[name], tensor) and torch.equal(reader.read(name), tensor)
        assert reader.shapes[name] == tuple(tensor.shape)


def test_a_tensor_that_is_not_as_planned_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="planned as"):
        write_shard(tmp_path / "x.safetensors", [TensorPlan("a", torch.float32, (2,))], lambda n: torch.zeros(3))
    assert list(tmp_path.iterdir()) == []


def test_a_full_drive_names_the_file(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    link = tmp_path / "x.safetensors.part"
    link.symlink_to(full)
    with pytest.raises(OSError, match="No space left") as info:
        write_shard(
            tmp_path / "x.safetensors",
            [TensorPlan("a", torch.uint8, (1 << 20,))],
            lambda n: torch.zeros(1 << 20, dtype=torch.uint8),
        )
    assert info.value.filename == str(tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "header"])
def test_a_damaged_shard_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model-00001-of-00001.safetensors"
    write_shard(path, [TensorPlan("a", torch.float32, (64,))], lambda n: torch.ones(64))
    data = path.read_bytes()
    path.write_bytes(
        {"cut": data[:-9], "empty": b"", "garbage": b"\xff" * 40, "header": data[:9] + b"}" + data[10:]}[damage]
    )
    refused(CheckpointError, str(path), lambda: ShardReader(tmp_path, "model"))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    refused(CheckpointError, "no tensor named b", lambda: ShardReader(tmp_path, "model").read("b"))


def _writer(values: dict[str, float]) -> Callable[[Path, Callable[[Path, int], None]], dict[str, Any]]:
    def write(folder: Path, on_file: Callable[[Path, int], None]) -> dict[str, Any]:
        path = folder / "model-00001-of-00001.safetensors"
        plans = [TensorPlan(n, torch.float32, ()) for n in values]
        on_file(path, write_shard(path, plans, lambda n: torch.tensor(values[n])))
        return {"step": 1}

    return write


def _save(run: Path, step: int, keep: int = 2) -> Path:
    return ck.save_checkpoint(run, step, _writer({"a": float(step)}), needed_bytes=100, keep=keep)


def test_save_open_rotate(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        _save(run, step)
    assert [p.name for p in ck.list_checkpoints(run)] == ["step-00000002", "step-00000003"]
    checkpoint = ck.newest_checkpoint(run)
    assert checkpoint is not None and checkpoint.step == 3 and checkpoint.trainer_state() == {"step": 3}
    assert ShardReader(checkpoint.path, "model").read("a") == 3


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 4, 6):
        _save(run, step, keep=3)
    assert _save(run, 3, keep=2).is_dir()
    assert [p.name for p in ck.list_checkpoints(run)] == ["step-00000002", "step-00000003"]
    assert _save(run, 1, keep=1).is_dir() and len(ck.list_checkpoints(run)) == 1
    (_save(run, 4, keep=9) / ck.MANIFEST).write_text("")
    assert _save(run, 2, keep=1).is_dir(), "a later one that cannot tell when it was written is none to keep instead"


def test_a_run_that_went_back_goes_on_with_what_it_saved_then(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def newest() -> int:
        found = ck.newest_checkpoint(run)
        assert found is not None
        return found.step

    for step in (2, 4, 6):
        _save(run, step, keep=9)
    assert ck.go_back_to(ck.open_checkpoint(run / ck.step_folder(6))) == [] and newest() == 6
    left = ck.go_back_to(ck.open_checkpoint(run / ck.step_folder(2)))
    assert [path.name for path in left] == [ck.step_folder(4), ck.step_folder(6)]
    assert newest() == 2, "killed before it saved anything"
    for step in (3, 5):
        _save(run, step, keep=9)
        assert newest() == step
        assert ck.go_back_to(ck.open_checkpoint(run / ck.step_folder(step))) == [], "said once"
    (run / ck.step_folder(5) / ck.TRAINER).unlink()
    assert newest() == 3, "the one before it on the same way"
    _save(run, 5, keep=3)
    assert [path.name for path in ck.list_checkpoints(run)] == [ck.step_folder(step) for step in (2, 3, 5)]
    assert [path.name for path in ck.go_back_to(ck.open_checkpoint(run / ck.step_folder(3)))] == [ck.step_folder(5)]
    assert ck.go_back_to(ck.open_checkpoint(run / ck.step_folder(5))) == [] and newest() == 5, "there and back"


def test_checkpoints_of_an_older_version_count_by_step(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        manifest = _save(tmp_path, step, keep=9) / ck.MANIFEST
        values = json.loads(manifest.read_text())
        del values["order"], values["checksum"], values["config_sha256"]
        values["format_version"] = 1
        manifest.write_text(json.dumps(values))
    assert [path.name[-1] for path in ck.list_checkpoints(tmp_path)] == ["2", "4", "6"]
    _save(tmp_path, 3, keep=9)
    assert [path.name[-1] for path in ck.list_checkpoints(tmp_path)] == ["4", "6", "2", "3"]


def test_another_scale_of_the_adapters_is_another_run(tmp_path: Path) -> None:
    def write(folder: Path, on_file: Callable[[Path, int], None]) -> dict[str, Any]:
        return {**_writer({"a": 1.0})(folder, on_file), "fingerprint": {"lora_r": 4, "lora_alpha": 8.0}}

    ck.save_checkpoint(tmp_path, 1, write, needed_bytes=0, keep=1)
    checkpoint = ck.newest_checkpoint(tmp_path)
    assert checkpoint is not None
    check_same_run(checkpoint, {"lora_r": 4, "lora_alpha": 8.0, "of a later version": 1})
    with pytest.raises(CheckpointError, match=r"made with lora_alpha 8.0, this run has 99.0.*--lora_alpha"):
        check_same_run(checkpoint, {"lora_r": 4, "lora_alpha": 99.0})


@pytest.mark.parametrize("damage", ["", "cut short", "no manifest"])
def test_a_kill_between_the_two_renames_of_a_save_loses_neither(tmp_path: Path, damage: str) -> None:
    old, new = _save(tmp_path, 5), _save(tmp_path / "elsewhere", 5)
    run = old.parent
    old.rename(run / f".{old.name}.old.part")
    aside = new.rename(run / f".{new.name}.part")
    write_shard(aside / "more", [TensorPlan("b", torch.float32, ())], lambda name: torch.tensor(7.0))
    if damage == "cut short":
        with open(aside / "model-00001-of-00001.safetensors", "r+b") as file:
            file.truncate(9)
    elif damage:
        (aside / "manifest.json").unlink()
    found = ck.newest_checkpoint(run)
    assert found is not None and found.path == old and (old / "more").exists() == (not damage)
    _save(run, 6)
    assert [path.name for path in ck.list_checkpoints(run)] == [ck.step_folder(5), ck.step_folder(6)]
    assert not list(run.glob(".*"))


@pytest.mark.parametrize("undo", [False, True])
def test_ranks_that_finish_a_replaced_step_at_once_do_not_stumble(tmp_path, monkeypatch, undo):
    """Another rank is faster: it has the new one in place before this one has looked at it, or right after."""
    old, new = _save(tmp_path, 5), _save(tmp_path / "elsewhere", 5)
    run, open_checkpoint = old.parent, ck.open_checkpoint
    old.rename(run / f".{old.name}.old.part")
    aside = new.rename(run / f".{new.name}.part")

    def with_another(path: Path) -> ck.Checkpoint:
        if undo:
            aside.rename(old)
            return open_checkpoint(path)
        found = open_checkpoint(path)
        aside.rename(old)
        return found

    monkeypatch.setattr(ck, "open_checkpoint", with_another)
    ck.finish_replacing(run)
    monkeypatch.undo()
    found = ck.newest_checkpoint(run)
    assert found is not None and found.path == old


def test_the_only_good_checkpoint_survives_a_failing_save(tmp_path: Path) -> None:
    _save(tmp_path, 1, keep=1)

    def fails(folder: Path, on_file: Callable[[Path, int], None]) -> dict[str, Any]:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device", str(folder))

    refused(OSError, "No space", lambda: ck.save_checkpoint(tmp_path, 2, fails, needed_bytes=1, keep=1))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert ck.newest_checkpoint(tmp_path) is not None


def test_no_room_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="too full for a checkpoint"):
        ck.save_checkpoint(tmp_path, 1, _writer({"a": 1.0}), needed_bytes=1 << 60, keep=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("short_bytes", "is_refused"), [(0, False), (1, True)])
def test_a_margin_stays_free_behind_a_save(tmp_path, monkeypatch, short_bytes, is_refused):
    free_bytes = 1000 + ck.SPACE_MARGIN_BYTES - short_bytes
    monkeypatch.setattr(ck.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_bytes))
    with pytest.raises(CheckpointError, match="margin of") if is_refused else nullcontext():
        ck.check_space(tmp_path, 1000)


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "manifest", "no manifest", "version"])
def test_damage_is_found_and_the_older_one_is_used(tmp_path: Path, damage: str) -> None:
    _save(tmp_path, 1)
    newest = _save(tmp_path, 2)
    shard = newest / "model-00001-of-00001.safetensors"
    manifest = newest / ck.MANIFEST
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "flip":
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    elif damage == "missing":
        shard.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-20])
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format_version": 99}))
    refused(CheckpointError, "step-00000002", lambda: ck.open_checkpoint(newest))
    said: list[str] = []
    checkpoint = ck.newest_checkpoint(tmp_path, on_bad=said.append)
    assert checkpoint is not None and checkpoint.step == 1
    assert said and "step-00000002" in said[0]


def test_pointing_at_the_run_instead_of_a_checkpoint_helps(tmp_path: Path) -> None:
    _save(tmp_path, 4)
    refused(CheckpointError, "step-00000004", lambda: ck.open_checkpoint(tmp_path))
    refused(CheckpointError, "no such checkpoint folder", lambda: ck.open_checkpoint(tmp_path / "nothing"))


KILL_SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from outcore.checkpoint.shards import TensorPlan, write_shard
from outcore.checkpoint.folders import save_checkpoint
run, left = Path(sys.argv[1]), [int(sys.argv[2])]
def write(folder, on_file):
    path = folder / "model-00001-of-00001.safetensors"
    def value(name):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((1 << 14,), 2.0)
    on_file(path, write_shard(path, [TensorPlan(f"t{i}", torch.float32, (1 << 14,)) for i in range(20)], value))
    return {}
for step in (1, 2, 3):
    save_checkpoint(run, step, write, needed_bytes=1, keep=1)
"""


@pytest.mark.more(after=1)
@pytest.mark.parametrize("lines", [7, 21, 33])
def test_kill_during_save_leaves_the_last_one_whole(tmp_path: Path, lines: int) -> None:
    """Of three saves of 20 tensors each, at this tensor."""
    run, script, log = tmp_path / "run", tmp_path / "killed.py", tmp_path / "log.txt"
    run.mkdir()
    script.write_text(KILL_SCRIPT)
    assert run_script(script, [str(run), str(lines)], os.environ, log) == -signal.SIGKILL, log.read_text()
    tmp_path = run
    checkpoint = ck.newest_checkpoint(tmp_path)
    assert (checkpoint is None) == (lines <= 20)
    for path in ck.list_checkpoints(tmp_path):
        ck.open_checkpoint(path)
    ck.sweep_unfinished(tmp_path)
    assert all(p.name.startswith("step-") for p in tmp_path.iterdir())
