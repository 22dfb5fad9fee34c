"""Locks that killed builds of C++ extensions leave: removed when nobody builds, and only then."""

import time
from pathlib import Path

import pytest

from outcore.engine.deepspeed.environment import remove_stale_builds, tell_of_builds
from outcore.machine.mounts import remove_stale_lock


def locked(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    return folder / "lock"


def test_of_a_build_in_progress_it_stays(tmp_path: Path) -> None:
    lock, proc = locked(tmp_path / "x/cpu_adam"), tmp_path / "proc"
    (proc / "12").mkdir(parents=True)
    (proc / "12/cwd").symlink_to(lock.parent)
    (proc / "13").mkdir()
    assert not remove_stale_lock(lock.parent, proc) and lock.exists()
    (proc / "12/cwd").unlink()
    assert remove_stale_lock(lock.parent, proc) and not lock.exists()
    assert not remove_stale_lock(lock.parent, proc)


def test_of_a_process_that_just_took_it_it_stays(tmp_path: Path) -> None:
    """torch holds it open from before ninja starts until after it has ended."""
    lock = locked(tmp_path / "x/cpu_adam")
    with open(lock):
        assert not remove_stale_lock(lock.parent) and lock.exists()
    assert remove_stale_lock(lock.parent) and not lock.exists()


def test_a_run_by_deepspeed_says_what_it_removed(tmp_path: Path) -> None:
    lock, said = locked(tmp_path / "cpu_adam"), []
    remove_stale_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path), "LOCAL_RANK": "1"}, said.append)
    assert lock.exists() and not said
    remove_stale_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)}, said.append)
    assert not lock.exists() and len(said) == 1 and "cpu_adam" in said[0] and str(tmp_path) in said[0]


def test_a_build_is_said_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed's own words are not shown, and the first start of two ranks was minutes of silence."""
    builder = pytest.importorskip("deepspeed.ops.op_builder.builder").OpBuilder
    said = []

    class Builder:
        name = "cpu_adam"

        def load(self) -> None:
            builder.jit_load(self, verbose=False)

    monkeypatch.setattr(builder, "jit_load", lambda _self, verbose: said.append(capsys.readouterr().err))
    tell_of_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path), "LOCAL_RANK": "1"})
    Builder().load()
    tell_of_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    Builder().load()
    locked(tmp_path / "py311_cpu/cpu_adam").with_name("cpu_adam.so").touch()
    Builder().load()
    monkeypatch.setattr("outcore.engine.deepspeed.environment.LOADING_S", 0.01)
    monkeypatch.setattr(builder, "jit_load", lambda _self, verbose: time.sleep(0.2))
    tell_of_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    Builder().load()
    assert "compiles its extension cpu_adam" in capsys.readouterr().err, "what is there is compiled again"
    assert said[0] == said[2] == "" and f"compiles its extension cpu_adam into {tmp_path}: once" in said[1]
