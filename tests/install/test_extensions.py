import io
import json
import sys
from pathlib import Path

import pytest

import outcore.install as install_room
from outcore.install import extensions
from outcore.install.extensions import (
    KEY_NAME,
    build_all,
    build_key,
    compile_jobs,
    explain_build,
    extension_environment,
    extensions_dir,
    extensions_for,
    is_built,
    missing_prerequisite,
)
from outcore.install.progress import InstallProgress
from tests.install.fakes import FakeStream, fake_environment

BY_NAME = {e.name: e for e in (*extensions_for("cpu"), *extensions_for("cuda"))}


def test_folder_belongs_to_the_environment(tmp_path: Path) -> None:
    assert extensions_dir(tmp_path) == tmp_path / "torch_extensions"
    assert extensions_dir() == Path(sys.prefix) / "torch_extensions"
    assert install_room.extensions_dir is extensions.extensions_dir
    assert install_room.extension_environment is extensions.extension_environment
    with pytest.raises(AttributeError):
        install_room.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_environment_of_a_child(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path / "v", {"torch": "2.13.0"})
    given = {"PATH": "/usr/bin", "TORCH_CUDA_ARCH_LIST": "8.9;9.0a"}
    got = extension_environment("cpu", environment.prefix, given)
    assert got["PATH"] == f"{environment.bin_dir}:/usr/bin" and got["DS_ACCELERATOR"] == "cpu"
    assert got["TORCH_CUDA_ARCH_LIST"] == "8.9;9.0" and int(got["MAX_JOBS"]) >= 1
    own = extension_environment("cuda", environment.prefix, given | {"TORCH_EXTENSIONS_DIR": "/mine", "MAX_JOBS": "7"})
    assert own["TORCH_EXTENSIONS_DIR"] == "/mine" and own["MAX_JOBS"] == "7" and "DS_ACCELERATOR" not in own
    again = extension_environment("cpu", environment.prefix, {"PATH": f"/usr/bin:{environment.bin_dir}"})
    assert again["PATH"] == got["PATH"]


def test_compilers_are_bound_by_ram(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 3000000 kB\nMemAvailable: 2500000 kB\n")
    assert compile_jobs(tmp_path) == 1


def add_built(directory: Path, name: str, key: dict[str, str]) -> None:
    (directory / name).mkdir(parents=True, exist_ok=True)
    (directory / name / f"{name}.so").touch()
    (directory / name / KEY_NAME).write_text(json.dumps(key))


def test_only_finished_builds_for_this_machine_count(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path / "v", {"torch": "2.13.0"})
    key = build_key(environment, "cpu")
    assert key["torch"] == "2.13.0" and key["deepspeed"] == "" and key["cpu"]
    add_built(tmp_path, "cpu_adam", key)
    assert is_built(tmp_path, BY_NAME["cpu_adam"], key) and not is_built(tmp_path, BY_NAME["deepspeed_shm_comm"], key)
    assert not is_built(tmp_path, BY_NAME["cpu_adam"], key | {"cpu": "another"})
    (tmp_path / "cpu_adam" / "lock").touch()
    assert not is_built(tmp_path, BY_NAME["cpu_adam"], key)
    (tmp_path / "cpu_adam" / "lock").unlink()
    for damaged in ("[]", "{"):
        (tmp_path / "cpu_adam" / KEY_NAME).write_text(damaged)
        assert not is_built(tmp_path, BY_NAME["cpu_adam"], key)


def test_prerequisites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions.shutil, "which", lambda name: None)
    assert missing_prerequisite() == "no C++ compiler"
    monkeypatch.setattr(extensions.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert missing_prerequisite() == ""


def test_only_missing_ones_are_built_and_failures_are_results(tmp_path: Path) -> None:
    directory = tmp_path / "ext"
    environment = fake_environment(tmp_path / "v")
    key = build_key(environment, "cpu")
    add_built(directory, "deepspeed_shm_comm", key | {"cpu": "another"})
    (directory / "cpu_adam").mkdir()
    (directory / "cpu_adam" / "lock").touch()
    stream = FakeStream((1, "x.cpp:3:10: fatal error: nothing.h: No such file"), (0, "[1/3] c++ a\n[2/3] c++ b"))
    out = io.StringIO()
    results = build_all(
        environment, "cpu", {"TORCH_EXTENSIONS_DIR": str(directory)}, stream, InstallProgress(out),
        tmp_path / "logs" / "build.log",
    )  # fmt: skip
    assert {r.name: r.built for r in results} == {"cpu_adam": False, "deepspeed_shm_comm": True}
    assert not (directory / "deepspeed_shm_comm/deepspeed_shm_comm.so").exists()  # of the other CPU
    assert json.loads((directory / "deepspeed_shm_comm" / KEY_NAME).read_text()) == key
    assert not (directory / "cpu_adam" / KEY_NAME).exists()
    assert [command[-1] for command in stream.commands] == ["CPUAdamBuilder", "ShareMemCommBuilder"]
    reasons = {r.name: r.reason for r in results}
    assert "fatal error: nothing.h" in reasons["cpu_adam"]
    text = out.getvalue()
    assert "removed the lock" in text
    assert "CPUAdam" not in text and "fatal error" in (tmp_path / "logs/build.log").read_text()


@pytest.mark.parametrize(("output", "reason"), [
    ("fatal error: Python.h: No such file or directory", "Python's headers"),
    ("c++: fatal error: Killed signal terminated program cc1plus", "out of memory"),
    ("as: No space left on device", "drive is full"),
    ("a\nRuntimeError: Ninja is required\n", "RuntimeError: Ninja is required"), ("", "no message"),
])  # fmt: skip
def test_build_failures_in_one_line(output: str, reason: str, tmp_path: Path) -> None:
    assert reason in explain_build(output, tmp_path / "log")
